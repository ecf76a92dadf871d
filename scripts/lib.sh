# Shared by the scripts in this folder, which source it and call, in this order: parse_options, set_up, build_regrad.

set -euo pipefail
shopt -s inherit_errexit # so that a failure within $(...) ends the script too

readonly repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly default_torch=2.15.0

packages=(
  ca-certificates git g++ cmake ninja-build ccache mold python3 python3-venv
  libgtest-dev librapidcheck-dev
  libcli11-dev libspdlog-dev libfmt-dev nlohmann-json3-dev zlib1g-dev
  dataset-fashion-mnist)

say() { echo "regrad: $*" >&2; }

die() {
  say "$@"
  exit 1
}

# --- Packages -----------------------------------------------------------------------------------------------------------

install_missing_packages() {
  if ! command -v apt-get >/dev/null; then
    say "this is no Debian: make sure that what these Debian packages hold is installed: ${packages[*]}"
    return
  fi

  local missing=()
  local package
  for package in "${packages[@]}"; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed' || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0

  say "installing: ${missing[*]}"
  local as_root=()
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null || die "not root, and there is no sudo. Run as root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  "${as_root[@]}" apt-get -o Acquire::Retries=5 update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -o Acquire::Retries=5 install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# --- LibTorch -----------------------------------------------------------------------------------------------------------

# Prints the folder of the TorchConfig.cmake that the user has already, if any.
torch_dir_of_user() {
  if [[ -n ${Torch_DIR:-} ]]; then
    echo "$Torch_DIR"
    return
  fi

  local prefixes prefix folder
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  # torch.utils.cmake_prefix_path, without the seconds that an import takes
  prefixes+=("$(python3 -c \
    'import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0] + "/share/cmake")' \
    2>/dev/null || true)")
  for prefix in "${prefixes[@]}"; do
    for folder in "$prefix/Torch" "$prefix/share/cmake/Torch"; do
      if [[ -n $prefix && -f $folder/TorchConfig.cmake ]]; then
        echo "$folder"
        return
      fi
    done
  done
}

# Prints the folder of the TorchConfig.cmake of the wheel of the given version, which is downloaded first where needed.
torch_dir_of_wheel() {
  local version=$1
  local cache="${XDG_CACHE_HOME:-$HOME/.cache}/regrad"
  local home="$cache/torch-$version"
  mkdir -p "$cache"
  (
    flock 9 # two builds at once: the second waits for the download of the first
    [[ -e $home ]] || download_torch "$version" "$home"
  ) 9>"$cache/lock" >&2
  echo "$home"/lib/python3*/site-packages/torch/share/cmake/Torch
}

# A wheel of torch has all of LibTorch. Without its dependencies, but with the two small wheels that libtorch_cpu.so needs, it
# takes 1.3 GB (2.15) or 1.8 GB (2.7) instead of 5. It is renamed to its place only when it is known to load: an interrupted download leaves nothing
# that looks finished.
download_torch() {
  local version=$1 home=$2
  local partial="$home.partial"
  say "downloading torch $version into $home (once; less than 2 GB)"
  rm -rf "$partial"
  python3 -m venv "$partial"
  pip_install "$partial" "torch==$version"

  local requirement
  for requirement in $(direct_requirements "$partial" torch '^cuda-toolkit$'); do
    pip_install "$partial" "$requirement"
  done
  for requirement in $(direct_requirements "$partial" 'torch cuda-toolkit' '^nvidia-cuda-(runtime|cupti)(-cu[0-9]+)?$'); do
    pip_install "$partial" "$requirement"
  done

  local library
  library="$(echo "$partial"/lib/python3*/site-packages/torch/lib/libtorch_cpu.so)"
  python3 -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$library" ||
    die "torch $version was downloaded, but its libtorch_cpu.so does not load"
  mv "$partial" "$home"
}

pip_install() {
  local venv=$1 requirement=$2
  local attempt
  for attempt in 1 2 3; do
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-cache-dir --retries 10 \
      "$requirement" && return
    say "attempt $attempt to install $requirement failed"
    sleep 5
  done
  die "cannot install $requirement: is the network up?"
}

# Prints those requirements, as name==version, of the given installed packages whose names match the pattern.
direct_requirements() {
  local venv=$1 owners=$2 pattern=$3
  "$venv/bin/python" - "$owners" "$pattern" <<'PYTHON'
import importlib.metadata
import re
import sys

owners, pattern = sys.argv[1].split(), sys.argv[2]
wanted = set()
for owner in owners:
    try:
        requirements = importlib.metadata.requires(owner) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    for requirement in requirements:
        # "cuda-toolkit[cudart,cupti]==13.2.2; platform_system == 'Linux'"
        name, version = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)", requirement).groups()
        if re.search(pattern, name):
            wanted.add(name + version.replace(" ", ""))
print("\n".join(sorted(wanted)))
PYTHON
}

# --- Options, set-up, build ---------------------------------------------------------------------------------------------

# Sets torch_version, preset and arguments (all others, as they are). Prints $usage for --help.
parse_options() {
  torch_version=
  preset=default
  arguments=()
  while [[ $# -gt 0 ]]; do
    case $1 in
      --help)
        echo "$usage"
        exit
        ;;
      --torch)
        torch_version=${2:?--torch needs a version}
        shift
        ;;
      --preset)
        preset=${2:?--preset needs a name}
        shift
        ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done
}

# Installs what is missing, and sets torch_dir and build_dir.
set_up() {
  install_missing_packages

  torch_dir=
  [[ -n $torch_version ]] || torch_dir="$(torch_dir_of_user)"
  [[ -n $torch_dir ]] || torch_dir="$(torch_dir_of_wheel "${torch_version:-$default_torch}")"
  say "LibTorch from $torch_dir"

  build_dir="$repository/build"
  [[ $preset == default ]] || build_dir+="-$preset"
  [[ -z $torch_version ]] || build_dir+="-torch-$torch_version"
}

# build_regrad [target]
build_regrad() {
  (
    cd "$repository" # where the presets are
    cmake --preset "$preset" -B "$build_dir" -DTorch_DIR="$torch_dir"
    cmake --build "$build_dir" --parallel "$(nproc)" --target "${1:-all}"
  )
}
