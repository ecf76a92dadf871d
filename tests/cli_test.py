"""The program `regrad` as its users see it: exit codes, messages, files. Usage: cli_test.py <regrad> [unittest arguments]."""

import gzip
import json
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

PROGRAM = ""


def run(*arguments, **keywords):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600, **keywords)


def write_idx(path, sizes, values):
    header = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
    with gzip.open(path, "wb") as file:
        file.write(header + bytes(values))


def write_images(folder):
    """Fashion-MNIST's four files with 24 images to train on and 12 to test on; each class has its own grey."""
    for part, count in (("train", 24), ("t10k", 12)):
        labels = [i % 10 for i in range(count)]
        pixels = [(20 * label + 7 * i) % 256 for label in labels for i in range(28 * 28)]
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", [count, 28, 28], pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", [count], labels)


class Cli(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="regrad_cli_")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.data = self.folder / "data"
        self.data.mkdir()
        write_images(self.data)
        self.output = self.folder / "output"

    def train(self, *arguments, **keywords):
        return run("train", "--data", self.data, "--output", self.output, "--batch", 4, "--threads", 1, *arguments, **keywords)

    def log(self):
        return [json.loads(line) for line in (self.output / "log.jsonl").read_text().splitlines()]

    def losses(self):
        return [record["loss"] for record in self.log() if record["event"] == "step"]


class General(Cli):
    def test_version(self):
        result = run("--version")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stdout, r"\Aregrad \d+\.\d+\.\d+\nTorch \d+\.\d+\.\d+\S*\n\Z")

    def test_help(self):
        for arguments in (["--help"], ["train", "--help"], ["bench", "--help"]):
            result = run(*arguments)
            self.assertEqual(result.returncode, 0)
            self.assertIn("Usage", result.stdout)

    def test_wrong_options(self):
        for arguments, word in (
            ([], "subcommand"),
            (["fly"], "subcommand"),
            (["train", "--wings", "2"], "--wings"),
            (["train", "--memory", "magic"], "magic"),
            (["train", "--memory", "recompute=0"], "recompute=0"),
            (["train", "--memory", "recompute=2x"], "recompute=2x"),
            (["train", "--batch", "0"], "--batch"),
            (["train", "--steps", "many"], "--steps"),
            (["train", "--steps", "2", "--epochs", "2"], "--epochs"),
            (["train", "--learning-rate", "-1"], "--learning-rate"),
            (["train", "--threads", "0"], "--threads"),
            (["bench", "--workload", "conv,knitting"], "knitting"),
            (["bench", "--layers", "4,0"], "--layers"),
            (["bench", "--memory", "reverse,magic"], "magic"),
            (["bench", "--rounds", "0"], "--rounds"),
        ):
            with self.subTest(arguments):
                result = run(*arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(word, result.stderr)
                self.assertEqual(result.stdout, "")


class Train(Cli):
    def test_a_short_run(self):
        result = self.train("--steps", 3, "--memory", "reverse")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertRegex(lines[-1], r"\Atest accuracy \d+\.\d %\Z")
        for strategy in ("reverse", "store", "recompute"):
            self.assertEqual(sum(line.startswith(strategy + " ") for line in lines), 1, result.stdout)
        self.assertIn("train 3/3", result.stderr)
        self.assertNotIn("\r", result.stderr)
        self.assertEqual({path.name for path in self.output.iterdir()}, {"log.jsonl", "checkpoint.pt"})

        start, *steps, final = self.log()
        self.assertEqual((start["event"], start["steps"], start["train_images"], start["test_images"]), ("start", 3, 24, 12))
        self.assertEqual([step["step"] for step in steps], [1, 2, 3])
        for step in steps:
            self.assertGreater(step["images_per_second"], 0)
            self.assertGreater(step["peak_bytes"], 0)
        self.assertEqual(final["event"], "result")
        self.assertEqual(lines[-1], f"test accuracy {100 * final['test_accuracy']:.1f} %")
        peaks = {cost["memory"]: cost["peak_bytes"] for cost in final["strategies"]}
        self.assertLess(peaks["reverse"], peaks["store"])
        self.assertLess(peaks["recompute"], peaks["store"])

    def test_learns(self):
        result = self.train("--steps", 40, "--learning-rate", 0.05)
        self.assertEqual(result.returncode, 0, result.stderr)
        losses = self.losses()
        self.assertLess(sum(losses[-5:]), 0.7 * sum(losses[:5]))

    def test_epochs(self):
        self.assertEqual(self.train("--epochs", 2).returncode, 0)
        self.assertEqual(len(self.losses()), 2 * 24 // 4)

    def test_the_seed_decides_and_the_strategy_does_not(self):
        def losses(*arguments):
            self.assertEqual(self.train("--steps", 3, *arguments).returncode, 0)
            return self.losses()

        store = losses("--seed", 5, "--memory", "store")
        self.assertEqual(losses("--seed", 5, "--memory", "store"), store)
        self.assertEqual(losses("--seed", 5, "--memory", "recompute=2"), store)
        self.assertNotEqual(losses("--seed", 6, "--memory", "store"), store)
        for reverse, stored in zip(losses("--seed", 5, "--memory", "reverse"), store):
            self.assertAlmostEqual(reverse, stored, delta=1e-3)

    def test_missing_data(self):
        result = self.train("--data", self.folder / "nowhere")
        self.assertEqual(result.returncode, 1)
        self.assertIn(str(self.folder / "nowhere"), result.stderr)
        self.assertFalse(self.output.exists())

    def test_broken_data(self):
        file = self.data / "t10k-images-idx3-ubyte.gz"
        file.write_bytes(file.read_bytes()[:-20])
        result = self.train()
        self.assertEqual(result.returncode, 1)
        self.assertIn(str(file), result.stderr)

    def test_a_batch_larger_than_the_set(self):
        result = self.train("--batch", 25)
        self.assertEqual(result.returncode, 2)
        self.assertIn("24 training images", result.stderr)

    def test_output_that_cannot_be_written(self):
        self.output.write_text("a file, no folder")
        result = self.train("--steps", 1)
        self.assertEqual(result.returncode, 1)
        self.assertIn(str(self.output), result.stderr)

    def test_interrupt(self):
        arguments = ["train", "--data", self.data, "--output", self.output, "--batch", "4", "--steps", "100000", "--threads", "1"]
        with subprocess.Popen([PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + 300
            while not ((self.output / "log.jsonl").exists() and len(self.log()) > 2) and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=300)
        self.assertEqual(process.returncode, 130)
        self.assertIn("interrupted after step", stderr)
        self.assertNotIn("test accuracy", stdout)
        last = self.log()[-1]
        self.assertEqual(last["event"], "interrupted")
        self.assertEqual(last["steps"], len(self.losses()))
        self.assertTrue((self.output / "checkpoint.pt").exists())

    def test_a_bar_on_a_terminal(self):
        master, slave = pty.openpty()
        shown = bytearray()

        def read_all():
            try:
                while chunk := os.read(master, 4096):
                    shown.extend(chunk)
            except OSError:  # how Linux says that the other end was closed
                pass

        reader = threading.Thread(target=read_all)
        reader.start()
        arguments = ["train", "--data", self.data, "--output", self.output, "--batch", "4", "--steps", "3"]
        result = subprocess.run([PROGRAM, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=slave, timeout=600)
        os.close(slave)
        reader.join()
        os.close(master)
        self.assertEqual(result.returncode, 0)
        self.assertRegex(shown.decode(), r"\rtrain \[#+\] 3/3  0:00 left  loss")


KEYS = {
    "workload", "layers", "memory", "threads", "step_seconds", "plain_step_seconds", "step_ratio", "peak_bytes",
    "plain_peak_bytes", "input_bytes", "peak_over_input", "max_relative_gradient_error",
}  # fmt: skip


class Bench(Cli):
    def bench(self, *arguments):
        result = run("bench", "--rounds", 1, "--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_one_row_for_each_combination(self):
        rows = self.bench("--workload", "mlp,tiny", "--layers", "2,3", "--memory", "store,recompute=2", "--batch", 8)
        self.assertEqual(
            [(row["workload"], row["layers"], row["memory"]) for row in rows],
            [(w, l, m) for w in ("mlp", "tiny") for l in (2, 3) for m in ("store", "recompute=2")],
        )
        for row in rows:
            self.assertEqual(set(row) - {"overhead_per_layer_seconds"}, KEYS)
            self.assertEqual("overhead_per_layer_seconds" in row, row["workload"] == "tiny")
            self.assertGreater(row["step_ratio"], 0)
            self.assertAlmostEqual(row["step_ratio"], row["step_seconds"] / row["plain_step_seconds"])
            self.assertEqual(row["peak_over_input"], row["peak_bytes"] / row["input_bytes"])

    def test_every_workload_has_the_gradients_of_plain(self):
        for workload in ("conv", "transformer", "mlp", "tiny"):
            for row in self.bench("--workload", workload, "--layers", 3, "--memory", "store,recompute,reverse", "--batch", 2):
                with self.subTest(workload=workload, memory=row["memory"]):
                    if row["memory"] == "reverse":
                        # Rounding of a rebuilt value next to zero can turn a ReLU, which is the whole of one gradient.
                        limit = 0.02 if workload == "conv" else 1e-5
                        self.assertLess(row["max_relative_gradient_error"], limit)
                    else:
                        self.assertEqual(row["max_relative_gradient_error"], 0)

    def test_store_takes_what_plain_takes_and_reverse_does_not_grow(self):
        rows = self.bench("--workload", "mlp", "--layers", "8,32", "--memory", "store,reverse", "--batch", 256)
        for row in rows:
            self.assertEqual(row["input_bytes"], 2 * 256 * 256 * 4)
        store_8, reverse_8, store_32, reverse_32 = rows
        for store in (store_8, store_32):
            self.assertAlmostEqual(store["peak_bytes"] / store["plain_peak_bytes"], 1, delta=0.01)
        self.assertGreater(store_32["peak_bytes"], 3 * store_8["peak_bytes"])
        self.assertAlmostEqual(reverse_32["peak_bytes"] / reverse_8["peak_bytes"], 1, delta=0.01)

    def test_what_cannot_fit_is_skipped(self):
        available = int(re.search(r"MemAvailable: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text()).group(1)) * 1024
        # A layer of mlp keeps four tensors of 256 floats for each item of the batch.
        batch = available // (4 * 256 * 4) // 100
        result = run("bench", "--workload", "mlp", "--layers", 150, "--memory", "store", "--batch", batch, "--rounds", 1, "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        (row,) = json.loads(result.stdout)
        self.assertIsNone(row["step_seconds"])
        self.assertIsNone(row["plain_peak_bytes"])
        self.assertIn("skipped", result.stderr)

    def test_a_table_without_json(self):
        result = run("bench", "--workload", "tiny", "--layers", "2", "--memory", "store,reverse", "--rounds", 1)
        self.assertEqual(result.returncode, 0)
        heading, *lines = result.stdout.splitlines()
        self.assertRegex(heading, r"\Aworkload +layers +memory")
        self.assertEqual([line.split()[:3] for line in lines], [["tiny", "2", "store"], ["tiny", "2", "reverse"]])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
