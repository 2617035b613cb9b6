"""`gptfit plan` and `gptfit propose` on the command line: exit codes, JSON names, one-line errors, light start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gptfit import measured
from gptfit.cli import main
from gptfit.config.read import load_config
from gptfit.dataset import data_folder
from gptfit.device.local_gpu import LocalGPU
from gptfit.plan.setting import Setting, speed_key
from gptfit.shape import ModelShape

SMALL = ["--gpu", "4070", "--batch_size=8", "--gradient_accumulation_steps=64"]


@pytest.fixture(autouse=True)
def no_local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers on a machine with a card."""
    monkeypatch.setattr("gptfit.verbs.gpu_and_data.local_gpu", lambda: None)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "fineweb"
    folder.mkdir()
    with (folder / "train.bin").open("wb") as file:
        file.truncate(2 * 1_000_000_000)
    (folder / "val.bin").write_bytes(b"\0\0" * 5000)
    return folder


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, object]:
    assert main([*words, "--json"]) == code
    parsed = json.loads(capsys.readouterr().out)
    assert isinstance(parsed, dict)
    return parsed


def test_json_has_the_promised_names(capsys: pytest.CaptureFixture[str]) -> None:
    fields = answer(capsys, "plan", *SMALL)
    promised = (
        "parameters weights flops_per_token tokens_per_step memory fits largest_micro_batch tokens_per_s ms_per_step "
        "mfu mfu_a100 hours tokens epochs loss perplexity problems"
    )
    assert set(promised.split()) <= set(fields)
    memory = fields["memory"]
    assert isinstance(memory, dict)
    assert {"allocated_gib", "device_gib", "parts"} <= set(memory)
    for name in ("tokens_per_s", "ms_per_step", "mfu", "mfu_a100", "hours", "loss", "perplexity"):
        estimate = fields[name]
        assert isinstance(estimate, dict)
        assert set(estimate) == {"value", "low", "high", "basis"}
        assert estimate["low"] <= estimate["value"] <= estimate["high"]


def test_a_run_that_does_not_fit_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    fields = answer(capsys, "plan", "--gpu", "4070", "--batch_size=16", "--program=nanogpt", code=1)
    assert fields["fits"] is False
    assert answer(capsys, "plan", "--gpu", "4070", "--batch_size=16", "--chunked_loss=False")["fits"] is True
    assert main(["plan", "--gpu", "4070", "--program=nanogpt", "--recipe=modern"]) == 1
    assert "nanoGPT has arch = 'gpt2' only" in capsys.readouterr().err


def test_a_run_that_does_not_start_exits_1_and_still_says_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "4070", "--n_embd=512"]) == 1
    out = capsys.readouterr().out
    assert "not divisible" in out
    assert "63.5M parameters" in out


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other tests train on this CPU; what they timed is not known here."""
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path / "cache"))


def test_cpu_plans_what_needs_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    fields = answer(capsys, "plan", "--gpu", "cpu", "--batch_size=2")
    assert isinstance(fields["tokens_per_s"], dict)
    assert fields["tokens_per_s"]["basis"] == "timed"
    assert fields["parameters"] == 123_587_328


def test_the_card_in_this_machine_is_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = LocalGPU("NVIDIA GeForce RTX 4070", 12282 * 2**20, 900 * 2**20, 1)
    monkeypatch.setattr("gptfit.verbs.gpu_and_data.local_gpu", lambda: card)
    fields = answer(capsys, "plan", "--batch_size=8")
    assert fields["gpu"] == "RTX 4070 12GB"
    memory = fields["memory"]
    assert isinstance(memory, dict)
    assert memory["usable_gib"] == pytest.approx((12282 - 900) / 1024, abs=0.01)


def test_a_local_card_nobody_knows_asks_for_a_similar_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfit.verbs.gpu_and_data.local_gpu", lambda: LocalGPU("Voodoo 2", 2**23, 0, 1))
    assert main(["plan"]) == 1
    assert "Voodoo 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["plan", "--gpu", "RTX 9999"], 1, "not in the table"),
        (["plan", *SMALL, "--gpus", "0"], 1, "--gpus 0"),
        (["plan", *SMALL, "--vram", "0"], 1, "--vram 0"),
        (["plan", *SMALL, "--watts", "-5"], 1, "--watts"),
        (["plan", *SMALL, "--data", "nowhere"], 1, "no such file"),
        (["plan", *SMALL, "--batchsize=3"], 1, "did you mean batch_size"),
        (["propose", "--gpu", "4070", "--data", "x"], 1, "--hours"),
        (["propose", "--gpu", "4070", "--hours", "0", "--data", "x"], 1, "--hours 0"),
        (["propose", "--gpu", "4070", "--hours", "nan", "--data", "x"], 1, "--hours nan"),
        (["propose", "--gpu", "4070", "--hours", "12"], 1, "--data"),
        (["propose", "--gpu", "4070", "--hours", "12", "--data", "nowhere"], 1, "no such file"),
        (["propose", "--gpu", "4070", "--hours", "1", "--data", "x", "--write", "a.txt"], 1, "ends in .py"),
        (["propose", "--gpu", "4070", "--hours", "1", "--data", "x", "--only", "this"], 1, "no such choice"),
    ],
)
def test_bad_input_is_one_line(words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize(
    "key", ["n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps"]
)
@pytest.mark.parametrize("value", ["0", "-1", "99999999999"])
def test_sizes_that_make_no_sense_are_problems_not_crashes(
    capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    fields = answer(capsys, "plan", "--gpu", "4070", f"--{key}={value}", code=1)
    assert fields["starts"] is False or fields["fits"] is False


def test_after_tune_on_a_cpu_plan_says_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTFIT_CACHE", str(tmp_path))
    words = ["plan", "--n_layer=6", "--n_embd=384", "--n_head=6", "--block_size=256", "--batch_size=4"]
    setting = Setting(ModelShape(6, 6, 384, 256, 50304), 4, dtype="float32", chunked_loss=True)
    key = speed_key(setting, "Some CPU, 2 threads")
    measured.append([measured.MeasuredSpeed(key, "2.9", 900.0, 1137.8, ms_per_update=60.0)])
    fields = answer(capsys, *words)
    rate, step = fields["tokens_per_s"], fields["ms_per_step"]
    assert isinstance(rate, dict)
    assert isinstance(step, dict)
    assert rate["basis"] == "measured"
    assert step["value"] == pytest.approx(40 * 1137.8 + 60)


def test_data_gives_tokens_and_epochs(capsys: pytest.CaptureFixture[str], tokens: Path) -> None:
    fields = answer(capsys, "plan", *SMALL, "--data", str(tokens), "--max_iters=6000", "--lr_decay_iters=6000")
    epochs = fields["epochs"]
    assert isinstance(epochs, dict)
    assert epochs["value"] == pytest.approx(3.145728)
    assert epochs["basis"] == "exact"


def test_the_folder_a_config_trains_on_is_found_by_itself(
    capsys: pytest.CaptureFixture[str], tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tokens.parent)
    fields = answer(capsys, "plan", *SMALL, "--dataset=fineweb", "--data_root=.")
    data_tokens = fields["data_tokens"]
    assert isinstance(data_tokens, dict)
    assert data_tokens["value"] == 1e9


def test_shakespeare_char_is_known_by_its_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = ["--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--batch_size=64"]
    run = ["--gradient_accumulation_steps=1", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.2"]
    fields = answer(capsys, "plan", "--gpu", "4070", "--dataset=shakespeare_char", *shape, *run)
    assert fields["parameters"] == 10_646_784
    loss = fields["loss"]
    assert isinstance(loss, dict)
    assert loss["low"] < 1.47 < loss["high"], "nanoGPT's README"


def test_an_empty_folder_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", *SMALL, "--data", str(tmp_path)]) == 1
    assert "gptfit prepare" in capsys.readouterr().err


def test_tokens_are_read_from_the_parquet_not_guessed_from_its_size(
    capsys: pytest.CaptureFixture[str], shared: Path
) -> None:
    """Advice says "1-2 B tokens in a 3.1 GB Parquet": 0.3 to 0.65 per byte of file. Compression decides, so look."""
    file = shared / "data" / "web_mdn.parquet"
    fields = answer(
        capsys, "plan", *SMALL, "--data", str(file), "--max_iters=200", "--lr_decay_iters=200", "--warmup_iters=9"
    )
    tokens, bytes_per_token = fields["data_tokens"], fields["bytes_per_token"]
    assert isinstance(tokens, dict)
    assert isinstance(bytes_per_token, float)
    assert tokens["value"] / file.stat().st_size > 1.0
    assert 2 < bytes_per_token < 6


def test_a_config_for_the_cpu_needs_no_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "plan", "--device=cpu", "--batch_size=2")["gpu"] is None


def test_a_parquet_without_text_is_one_line(capsys: pytest.CaptureFixture[str], shared: Path) -> None:
    assert main(["plan", *SMALL, "--data", str(shared / "data" / "edge_no_text_column.parquet")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_proposal_is_written_once_and_reads_back(
    capsys: pytest.CaptureFixture[str], tokens: Path, tmp_path: Path
) -> None:
    target = tmp_path / "configs" / "mine.py"
    words = ["propose", "--gpu", "4070", "--hours", "12", "--data", str(tokens), "--write", str(target)]
    assert main(words) == 0
    assert "Wrote" in capsys.readouterr().out
    assert answer(capsys, "plan", str(target), "--gpu", "4070")["fits"] is True
    before = target.read_bytes()
    assert main(words) == 1
    assert "exists already" in capsys.readouterr().err
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["mine.py"]


def test_train_finds_the_data_of_a_proposal_wherever_it_is(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name under data/, where nanoGPT looks; by its path elsewhere."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(tokens)
    monkeypatch.chdir(tmp_path)
    for data, file in (("data/mine", "name.py"), (str(tokens), "path.py")):
        assert main(["propose", "--gpu", "4070", "--hours", "12", "--data", data, "--write", file]) == 0
    capsys.readouterr()
    (tmp_path / "data" / "mine").unlink()
    config = load_config(["path.py"]).config
    assert data_folder(config.dataset).samefile(tokens)
    assert load_config(["name.py"]).config.dataset == "mine"


def test_stock_nanogpt_would_accept_the_written_config(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """nanoGPT runs the file as Python in its own globals: plain assignments only, of names it has."""
    target = tmp_path / "mine.py"
    words = ["propose", "--gpu", "4070", "--hours", "12", "--data", str(tokens), "--only", "nanogpt"]
    assert main([*words, "--write", str(target)]) == 0
    capsys.readouterr()
    names: dict[str, object] = {}
    exec(target.read_text(encoding="utf-8"), {}, names)
    from gptfit.config.keys import DEFAULTS, GPTFIT_KEYS

    assert set(names) <= set(DEFAULTS) - GPTFIT_KEYS


@pytest.mark.parametrize("width", ["80", "120"])
def test_a_plan_fits_one_screen(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptfit.verbs.common.PIPED_WIDTH", int(width))
    assert main(["plan", *SMALL, "--max_iters=6000", "--lr_decay_iters=6000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= int(width)


def test_planning_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gptfit.cli import main; main(['plan', '--gpu', '4070', '--batch_size=8']);"
        "heavy = {'torch', 'numpy', 'pyarrow', 'plotly', 'scipy'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
