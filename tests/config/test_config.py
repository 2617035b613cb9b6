"""Keys, defaults, precedence and validation: nanoGPT's, with a remedy in every error."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptfit.config.keys import TrainConfig, find_problems, find_warnings
from gptfit.config.read import load_config
from gptfit.config.write import render
from gptfit.errors import ConfigError, UsageError

# train.py of nanoGPT at commit 3adf61e, as data; device and dtype are ours ('auto' finds what nanoGPT hard-codes).
NANOGPT = {
    "out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False, "always_save_checkpoint": True,
    "init_from": "scratch", "wandb_log": False, "wandb_project": "owt", "wandb_run_name": "gpt2", "dataset": "openwebtext",
    "gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "dropout": 0.0,
    "bias": False, "learning_rate": 6e-4, "max_iters": 600000, "weight_decay": 1e-1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5, "backend": "nccl", "compile": True,
}  # fmt: skip


def test_every_nanogpt_key_has_nanogpts_default() -> None:
    config = TrainConfig().as_dict()
    assert {key: config[key] for key in NANOGPT} == NANOGPT


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_lose_to_files_and_files_to_the_command_line(tmp_path: Path) -> None:
    first = write(tmp_path, "batch_size = 4\nn_layer = 6\nn_embd = 384\nn_head = 6\n", "a.py")
    second = write(tmp_path, "n_layer = 8\n", "b.py")
    loaded = load_config([first, second], ["--batch_size=2", "--wandb_run_name=a=b", "--compile=False"])
    config = loaded.config
    assert (config.batch_size, config.n_layer, config.n_embd, config.block_size) == (2, 8, 384, 1024)
    assert (config.wandb_run_name, config.compile) == ("a=b", False)
    assert loaded.sources["n_layer"] == f"{second}:1"


def test_arithmetic_names_docstrings_comments_and_imports(tmp_path: Path) -> None:
    text = '"""A note."""\nimport time\n# comment\nbase = 6\nn_layer = base * 2\nmax_iters = 6e3\nlr_decay_iters = max_iters\n'
    text += "warmup_iters = 2**3\nlearning_rate = 1\nmin_lr = learning_rate / 10\nwandb_run_name = 'ft-' + str(time.time())\n"
    loaded = load_config([write(tmp_path, text)])
    config = loaded.config
    assert (config.n_layer, config.max_iters, config.lr_decay_iters, config.min_lr) == (12, 6000, 6000, 0.1)
    assert isinstance(config.learning_rate, float)
    assert "import ignored" in loaded.notes[0]


def test_a_name_a_later_line_uses_may_be_any_name_but_an_unused_one_is_a_typo(tmp_path: Path) -> None:
    assert load_config([write(tmp_path, "rows = 4\nbatch_size = rows * 2\n")]).config.batch_size == 8
    with pytest.raises(ConfigError, match=r"mine\.py:2: batchsize is not a key; did you mean batch_size\?"):
        load_config([write(tmp_path, "\nbatchsize = 8\n")])


@pytest.mark.parametrize(("override", "message"), [
    ("--nope=1", "--nope is not a key"),
    ("--n_emb=512", "did you mean n_embd"),
    ("--batch_size=eight", "batch_size takes a whole number, not 'eight'"),
    ("--batch_size=2.5", "batch_size takes a whole number"),
    ("--compile=maybe", "compile takes True or False"),
    ("--learning_rate=fast", "learning_rate takes a number"),
    ("--batch_size=True", "batch_size takes a whole number"),
    ("--n_embd=None", "n_embd takes a whole number"),
])  # fmt: skip
def test_bad_overrides_are_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_text_key_may_look_like_a_number() -> None:
    assert load_config([], ["--wandb_run_name=123"]).config.wandb_run_name == "123"


def test_an_override_without_a_value_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--batch_size=VALUE"):
        load_config([], ["--batch_size"])


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("false", False), ("True", True), ("1", True), ("0", False)]
)
def test_booleans_as_nanogpt_users_write_them(text: str, value: bool) -> None:
    assert load_config([], [f"--compile={text}"]).config.compile is value


def test_none_means_off_where_off_is_the_default() -> None:
    config = load_config([], ["--max_hours=None", "--tokens_per_step=None", "--gpu=None"]).config
    assert (config.max_hours, config.tokens_per_step, config.gpu) == (0.0, 0, "")


@pytest.mark.parametrize(("changes", "words"), [
    ({"n_embd": 512, "n_head": 12}, "n_embd 512 is not divisible by n_head 12; use n_head = 8"),
    ({"n_layer": 0}, "n_layer = 0 is out of range"),
    ({"batch_size": -1}, "batch_size = -1"),
    ({"dropout": 1.0}, "dropout = 1.0"),
    ({"min_lr": 1.0}, "min_lr 1 is above learning_rate"),
    ({"dtype": "fp8"}, "use one of auto, float32"),
    ({"device": "gpu"}, "device = 'gpu' is not known"),
    ({"tokens_per_step": 100_000}, "not divisible by batch_size * block_size = 12288; use tokens_per_step = 98304"),
    ({"learning_rate": float("nan")}, "learning_rate = nan"),
])  # fmt: skip
def test_what_cannot_start_says_why_and_what_to_do(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "words"), [
    ({"warmup_iters": 100, "max_iters": 50, "lr_decay_iters": 200}, "longer than max_iters 50: the rate rises to 0.5 of"),
    ({"lr_decay_iters": 10}, "lr_decay_iters 10 ends before warmup_iters 2000"),
    ({"max_iters": 5000, "lr_decay_iters": 4000}, "the last steps run at min_lr"),
    ({"always_save_checkpoint": False}, "always_save_checkpoint = False is not used: ckpt.pt is the last state"),
    ({"normuon": True}, "normuon = True needs optimizer = 'muon'"),
    ({"decay_fraction": 0.5}, "decay_fraction = 0.5 needs schedule = 'wsd'"),
])  # fmt: skip
def test_what_runs_as_in_nanogpt_or_does_nothing_is_a_warning(changes: dict[str, Any], words: str) -> None:
    (warning,) = find_warnings(TrainConfig(**changes).as_dict())
    assert words in warning.line


def test_a_config_as_it_should_be_has_no_warning() -> None:
    assert find_warnings(TrainConfig().as_dict()) == []


def test_accumulation_must_divide_among_processes() -> None:
    problems = find_problems(TrainConfig(gradient_accumulation_steps=5).as_dict(), processes=2)
    assert problems[0].where == "gradient_accumulation_steps"
    assert "= 6" in problems[0].fix


def test_tokens_per_step_derives_the_accumulation() -> None:
    config = TrainConfig(tokens_per_step=524_288, batch_size=8)
    assert (config.accumulation(), config.tokens_per_iter()) == (64, 524_288)
    assert config.replace(batch_size=4).tokens_per_iter() == 524_288


def test_an_unchecked_config_can_be_talked_about() -> None:
    config = TrainConfig.unchecked(n_embd=512, n_head=12)
    assert config.problems()[0].where == "n_embd"
    assert config.shape().parameters > 0


@given(
    n_head=st.integers(1, 24), head=st.integers(1, 16), lr=st.floats(1e-6, 1, allow_subnormal=False),
    name=st.text(max_size=20), compile=st.booleans(), accumulation=st.integers(1, 512), chunked=st.sampled_from(["auto", True]),
)  # fmt: skip
def test_a_written_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, n_head: int, head: int, lr: float, name: str, compile: bool,
    accumulation: int, chunked: str | bool,
) -> None:  # fmt: skip
    config = TrainConfig(
        n_head=n_head, n_embd=8 * head * n_head, learning_rate=lr, min_lr=lr / 10, compile=compile, chunked_loss=chunked,
        wandb_run_name=name, gradient_accumulation_steps=accumulation, max_hours=lr * 7,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("config") / "written.py"
    path.write_text(render(config, title="a\nb", notes=["n"]), encoding="utf-8")
    assert load_config([path]).config == config


def test_a_written_config_is_a_lab_note_and_plain_python(tmp_path: Path) -> None:
    text = render(TrainConfig(batch_size=8, gradient_accumulation_steps=64))
    assert "8 rows x 1024 tokens x 64 micro-steps = 524,288 tokens per step" in text
    assert "# head size 64" in text
    ast.parse(text)


def test_nanogpts_own_configs_read(tmp_path: Path) -> None:
    # The lines of nanoGPT's config/train_shakespeare_char.py that carry values, with its commented ones left out.
    text = "out_dir = 'out-shakespeare-char'\neval_interval = 250 # keep frequent\nlog_interval = 10\n"
    text += "always_save_checkpoint = False\nwandb_log = False\ndataset = 'shakespeare_char'\n"
    text += (
        "gradient_accumulation_steps = 1\nbatch_size = 64\nblock_size = 256\nn_layer = 6\nn_head = 6\nn_embd = 384\n"
    )
    text += (
        "dropout = 0.2\nlearning_rate = 1e-3\nmax_iters = 5000\nlr_decay_iters = 5000\nmin_lr = 1e-4\nbeta2 = 0.99\n"
    )
    text += "warmup_iters = 100\n# device = 'cpu'\n# compile = False\n"
    config = load_config([write(tmp_path, text)]).config
    assert (config.tokens_per_iter(), config.beta2, config.always_save_checkpoint) == (16384, 0.99, False)
