"""Prepare side by side: tokens per CPU-second against nanoGPT's way and a plain script; stages, memory, kills.

python bench/prepare.py                      all parts, on ../shared/data/web_*.parquet repeated
python bench/prepare.py speed --parquet F    one part, any Parquet with a `text` column
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _many_workers import FILES, keep, lock_lines, measure_lock, measure_ray, ray_lines

HERE = Path(__file__).resolve()
SHARED = HERE.parent.parent.parent / "shared" / "data"
WORKERS = 2
TARGETS = {"nanogpt": 25.0, "script": 6.0}
# Others on the same machine can halve a core's speed for seconds: ours, which takes seconds, runs before, between and
# after the others, which take minutes and average over it.
ORDER = (*3 * ("gptfit",), "nanogpt", *3 * ("gptfit",), "script", *3 * ("gptfit",))
SPEED_CHARS = 2e9  # of text in the speed part: the files are repeated until it is reached


@dataclass(frozen=True)
class Cost:
    """One run: what it made and what it took, children included."""

    tokens: int
    cpu_seconds: float
    wall_seconds: float
    peak_mb: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS, *CONTENDERS])
    parser.add_argument(
        "--parquet", type=Path, nargs="*", help="files with a text column (default: ../shared/data/web_*)"
    )
    parser.add_argument(
        "--copies", type=int, help="how often the files are repeated (default: speed 2 GB of text, stages 4, kills 16)"
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--keep", action="store_true", help="lock and ray: write the figures and docs/prepare.md")
    parser.add_argument("--work", type=Path, help="for contenders: source, then out")
    args = parser.parse_args()
    if args.part in CONTENDERS:
        CONTENDERS[args.part](args.work / "source.parquet", args.work / "out")
        return 0
    files = args.parquet or sorted(SHARED.glob("web_*.parquet"))
    if not files:
        print("skipped: needs ../shared/data or --parquet FILE")
        return 0
    for name, part in PARTS.items():
        if args.part in ("all", name):
            with tempfile.TemporaryDirectory(prefix="gptfit-bench-") as folder:
                part(files, Path(folder), args)
    return 0


def repeat(files: list[Path], copies: int, path: Path) -> int:
    """In a process of its own: Linux counts the memory of a parent into the peak of its children."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_repeat, files, copies, path).result()


def _repeat(files: list[Path], copies: int, path: Path) -> int:
    """The files' texts `copies` times in one Parquet of row groups like FineWeb's; returns the characters of text."""
    table = pa.concat_tables([pq.read_table(file, columns=["text"]) for file in files])
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for _ in range(copies):
            writer.write_table(table, row_group_size=1000)
    return copies * sum(len(text or "") for text in table.column("text").to_pylist())


def speed(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Whole commands, start-up and all, each on the same file: about as much text as one file of FineWeb holds."""
    copies = args.copies or max(1, round(SPEED_CHARS / repeat(files, 1, folder / "source.parquet")))
    size = repeat(files, copies, folder / "source.parquet")
    print(
        f"speed: {size / 1e9:.2f}e9 characters of text, {WORKERS} workers, CPU-seconds of the process and its children"
    )
    costs: dict[str, list[Cost]] = {}
    for name in ORDER:
        if cost := run_contender(name, folder):
            costs.setdefault(name, []).append(cost)
        else:
            print(f"  {name:<8} skipped: pip install datasets")
    rates = {}
    for name, runs in costs.items():
        cost = sorted(runs, key=lambda cost: cost.cpu_seconds)[len(runs) // 2]
        rates[name] = cost.tokens / cost.cpu_seconds
        print(
            f"  {name:<8} {cost.tokens:>12,} tokens in {cost.cpu_seconds:6.1f} CPU-s ({cost.wall_seconds:.1f} s wall, "
            f"{cost.peak_mb:.0f} MB): {rates[name] / 1e6:6.2f} Mtokens per CPU-s{among(runs)}"
        )
    for name, target in TARGETS.items():
        if name in rates:
            print(f"  gptfit is {rates['gptfit'] / rates[name]:.1f}x {name} (target {target:g}x)")


def among(runs: list[Cost]) -> str:
    seconds = [cost.cpu_seconds for cost in runs]
    return f", the median of {len(runs)} ({min(seconds):.1f} to {max(seconds):.1f} CPU-s)" if len(runs) > 1 else ""


def run_contender(name: str, folder: Path) -> Cost | None:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE), name, "--work", str(folder)]
    if name == "gptfit":
        command = [sys.executable, "-m", "gptfit", "prepare", str(folder / "source.parquet"), "--out", str(out)]
        command += ["--workers", str(WORKERS), "--val-fraction", "0.0005"]
    cost = run_measured(command, lambda: sum(file.stat().st_size for file in out.rglob("*.bin")) // 2)
    for file in sorted(out.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    return cost


def run_measured(command: list[str], tokens: Callable[[], int]) -> Cost | None:
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode == 3:
        return None
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(tokens(), cpu, time.perf_counter() - started, usage.ru_maxrss / 1e3)


def contend_nanogpt(source: Path, out: Path) -> None:
    """The approach of nanoGPT's data/openwebtext/prepare.py: datasets' map with tiktoken, then a memory map."""
    try:
        import datasets
    except ImportError:
        raise SystemExit(3) from None

    from gptfit.data.encoders import TiktokenEncoder

    datasets.disable_progress_bars()
    encoding = TiktokenEncoder()._encoding

    def process(example: dict[str, str]) -> dict[str, object]:
        ids = encoding.encode_ordinary(example["text"])
        ids.append(50256)
        return {"ids": ids, "len": len(ids)}

    loaded = datasets.load_dataset("parquet", data_files=str(source), cache_dir=str(out / "cache"), num_proc=1)["train"]
    split = loaded.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    tokenized = split.map(process, remove_columns=["text"], num_proc=WORKERS)
    for name, rows in (("train", tokenized["train"]), ("val", tokenized["test"])):
        total = int(np.sum(rows["len"], dtype=np.uint64))
        array = np.memmap(out / f"{name}.bin", dtype=np.uint16, mode="w+", shape=(total,))
        batches, position = min(1024, len(rows)), 0
        for i in range(batches):
            batch = rows.shard(num_shards=batches, index=i, contiguous=True).with_format("numpy")
            joined = np.concatenate(batch["ids"])
            array[position : position + len(joined)] = joined
            position += len(joined)
        array.flush()


def contend_script(source: Path, out: Path) -> None:
    """What one would write in twenty lines: pyarrow, a process pool over row groups, tiktoken."""
    groups = pq.ParquetFile(source).num_row_groups
    with (
        multiprocessing.Pool(WORKERS, initializer=_script_start, initargs=(source,)) as pool,
        open(out / "train.bin", "wb") as file,
    ):
        for raw in pool.imap(_script_group, range(groups)):
            file.write(raw)


def _script_start(source: Path) -> None:
    global _encoding, _file
    from gptfit.data.encoders import TiktokenEncoder

    _encoding, _file = TiktokenEncoder()._encoding, pq.ParquetFile(source)


def _script_group(index: int) -> bytes:

    ids: list[int] = []
    for text in _file.read_row_group(index, columns=["text"]).column("text").to_pylist():
        ids += _encoding.encode_ordinary(text)
        ids.append(50256)
    return np.array(ids, dtype=np.uint16).tobytes()


def stages(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Reading, encoding and writing each alone, against the pipeline that does all three; CPU-seconds of one process."""
    from gptfit.data.options import PrepareOptions
    from gptfit.data.prepare import prepare
    from gptfit.data.tokenizer import gpt2_tokenizer

    repeat(files, args.copies or 4, folder / "source.parquet")
    encoder = gpt2_tokenizer().encoder
    spent = dict.fromkeys(("read", "encode", "write"), 0.0)
    file = pq.ParquetFile(folder / "source.parquet")
    with open(folder / "alone.bin", "wb") as out:
        for group in range(file.num_row_groups):
            started = time.process_time()
            texts = file.read_row_group(group, columns=["text"], use_threads=False).column("text").to_pylist()
            spent["read"] += time.process_time() - started
            started = time.process_time()
            ids, _ = encoder.encode_batch(texts)
            spent["encode"] += time.process_time() - started
            small = ids.astype("uint16")
            started = time.process_time()
            out.write(small.data)
            spent["write"] += time.process_time() - started
    started = time.process_time()
    prepare(PrepareOptions((str(folder / "source.parquet"),), folder / "out", workers=WORKERS))
    pipeline = time.process_time() - started
    limit = sum(spent.values())
    alone = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items())
    print(
        f"stages: {alone} CPU-s alone, sum {limit:.2f}; pipeline {pipeline:.2f}: {100 * limit / pipeline:.0f} % of the limit (target 60 %)"
    )


def memory(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Peak memory of the command for inputs of about 0.1, 0.5 and 2 GB of text."""
    one = repeat(files, 1, folder / "one.parquet")
    for gigabytes in (0.1, 0.5, 2.0):
        size = repeat(files, max(1, round(gigabytes * 1e9 / one)), folder / "source.parquet")
        cost = run_contender("gptfit", folder)
        assert cost is not None
        print(
            f"memory: {size / 1e9:4.2f}e9 characters of text, {WORKERS} workers: peak {cost.peak_mb:.0f} MB (target 500), {cost.wall_seconds:.1f} s"
        )


def kills(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """Random SIGKILLs; the end must have the bytes of an undisturbed run."""
    repeat(files, args.copies or 16, folder / "source.parquet")
    command = [
        sys.executable,
        "-m",
        "gptfit",
        "prepare",
        str(folder / "source.parquet"),
        "--workers",
        str(WORKERS),
        "--out",
    ]
    subprocess.run([*command, str(folder / "undisturbed")], check=True, stdout=subprocess.DEVNULL)
    out, rng, landed = folder / "killed", random.Random(0), 0
    for _ in range(args.kills):
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL)
        while not (out / "train.bin.part").exists() and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        landed += process.wait() < 0
    subprocess.run([*command, str(out)], check=True, stdout=subprocess.DEVNULL)
    same = all(sha256(folder / "undisturbed" / name) == sha256(out / name) for name in ("train.bin", "val.bin"))
    print(f"kills: {landed} of {args.kills} SIGKILLs hit a running prepare; sha256 {'the same' if same else 'DIFFERS'}")
    if not same:
        raise SystemExit(1)


def lock(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """How threads would scale: the share of a worker's time under the interpreter lock, and what 16 cores make of it."""
    found = measure_lock(files, args.copies or 8, folder)
    print("lock:", *lock_lines(found), sep="\n  ")
    if args.keep:
        keep("lock", found)


def ray(files: list[Path], folder: Path, args: argparse.Namespace) -> None:
    """1, 2 and 4 local Ray workers on the same files; then on paper what a cluster takes."""
    sources = folder / "sources"
    sources.mkdir()
    size = sum(repeat(files, args.copies or 4, sources / f"{i:02d}.parquet") for i in range(FILES))
    found = measure_ray(sources, size, folder)
    print("ray:", *ray_lines(found), sep="\n  ")
    if args.keep:
        keep("ray", found)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CONTENDERS = {"nanogpt": contend_nanogpt, "script": contend_script}  # those that are code of this file
PARTS = {"speed": speed, "stages": stages, "memory": memory, "kills": kills, "lock": lock, "ray": ray}

if __name__ == "__main__":
    sys.exit(main())
