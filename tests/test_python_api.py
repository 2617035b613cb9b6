"""The Python face: the documented examples run, importing is light, and a function wins over the package of its name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gptfit
from gptfit.tune import measuring, search

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
FUNCTIONS = ["prepare", "plan", "propose", "tune", "train", "compare", "load", "sample", "evaluate", "export"]


def test_the_examples_of_the_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "TIMED_SECONDS", 0.05)
    monkeypatch.setattr(search, "MOST_ROUNDS", 1)
    texts = [f"The document number {i} says the same as the others, and ends." for i in range(200)]
    pq.write_table(pa.table({"text": texts}), "docs.parquet")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) >= 8
    names: dict[str, object] = {}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/python.md, block {number}", "exec"), names)
    result, longer, losses, loss = names["result"], names["longer"], names["losses"], names["loss"]
    assert result.reason == "max_iters"
    assert (result.step, longer.step) == (20, 30)
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert 0 < loss.loss < 6
    assert len(names["texts"]) == 2
    assert names["tuned"].best.tokens_per_s > 0
    assert Path("comparison.html").stat().st_size > 100_000
    assert (Path("for-nanogpt") / "ckpt.pt").is_file()
    assert Path("out-a/report.html").is_file()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_public_documented_and_shown_on_the_page(name: str) -> None:
    function = getattr(gptfit, name)
    assert name in gptfit.__all__
    assert name in dir(gptfit)
    assert inspect.isfunction(function)
    assert inspect.getdoc(function)
    assert f"gptfit.{name}(" in PAGE


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in gptfit.__all__:
        assert getattr(gptfit, name) is not None
    assert not hasattr(gptfit, "nonsense")
    assert (Path(gptfit.__file__).parent / "py.typed").is_file()


def test_a_function_wins_over_the_package_of_its_name_in_either_order() -> None:
    program = (
        "import gptfit.plan.speed, gptfit.train, gptfit.tune.rank\n"
        "from gptfit.plan import memory\n"
        "from gptfit.compare.axes import AXES\n"
        "from gptfit.plan.plan import plan as inner\n"
        "assert AXES and memory.predict\n"
        "assert gptfit.plan is not inner and callable(gptfit.plan), gptfit.plan\n"
        "import gptfit.export\n"
        "from gptfit import export, train\n"
        "assert callable(export) and callable(train) and callable(gptfit.compare)\n"
        "print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_importing_gptfit_loads_nothing_of_ours_and_nothing_heavy() -> None:
    program = (
        "import sys\nbefore = set(sys.modules)\nimport gptfit\nnew = set(sys.modules) - before\n"
        "print(sorted(name for name in new if name.startswith('gptfit')))\n"
        "plan = gptfit.plan(gpu='4070')\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['gptfit']", "[]"]


def test_what_is_wrong_is_one_error_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(gptfit.GptfitError, match="did you mean batch_size"):
        gptfit.plan(gpu="4070", batchsize=8)
    with pytest.raises(gptfit.GptfitError, match="batch_size takes a number, text, True or False, not list"):
        gptfit.plan(gpu="4070", batch_size=[8])
    with pytest.raises(gptfit.GptfitError, match="no such config file"):
        gptfit.plan(tmp_path / "missing.py", gpu="4070")
    with pytest.raises(gptfit.GptfitError, match="'onnx' is not a format; choose one of hf, gguf, nanogpt"):
        gptfit.export(tmp_path, "onnx")
    with pytest.raises(gptfit.GptfitError, match="nothing to compare"):
        gptfit.compare()


def test_keys_win_over_files_and_a_config_is_taken_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("batch_size = 2\nn_layer = 6\n")
    found = gptfit.plan(file, gpu="4070", batch_size=4).config
    assert (found.batch_size, found.n_layer) == (4, 6)
    config = gptfit.TrainConfig(n_layer=3, n_head=2, n_embd=64, out_dir="123")
    assert gptfit.plan(config, gpu="4070").config == config
    assert gptfit.plan([file, os.fspath(file)], gpu="4070", dataset=tmp_path).config.dataset == str(tmp_path)
