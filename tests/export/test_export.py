"""`gptfit export`: other programs compute what we compute, and nothing half-written is left behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.checkpoint.loaded_model import open_model
from gptfit.cli import main
from gptfit.data.tokenizer import Tokenizer, alphabet_table, char_tokenizer, load_tokenizer
from gptfit.data.tokenizer_formats import to_bpe_tables, to_tokenizer_json
from gptfit.errors import RunError
from gptfit.export.export import export
from gptfit.export.gguf import gguf_name, write_gguf
from gptfit.export.model_card import loss_curve, write_model_card
from gptfit.logs.events import Eval
from gptfit.shape import ModelShape
from gptfit.verbs.export import expected_seconds
from tests.forking import fork, gptfit_program
from tests.generate.test_evaluate import make_byte_run
from tests.generate.test_sample import ALPHABET, make_chars_data
from tests.models import save_checkpoint, tiny_model

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
TEXT = "Hello naïve world,\n\n  it's 1984 — 你好 🙂"


def bare_run(folder: Path, bias: bool, vocab_size: int = 50304) -> Path:
    save_checkpoint(tiny_model(bias=bias, vocab_size=vocab_size), folder / "ckpt.pt")
    return folder


@torch.inference_mode()
def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    return open_model(str(path)).model.logits(ids)


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_transformers_computes_our_logits(bias: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bare_run(tmp_path, bias)
    assert main(["export", str(run), "--to", "hf"]) == 0
    assert "logits of 32 tokens equal ours in transformers" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.activation_function == "gelu"
    ids = torch.randint(50304, (3, 16), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(model(ids).logits, logits_of(run, ids), atol=1e-5, rtol=1e-5)
    assert not (tmp_path / "hf.tmp").exists()


@torch.inference_mode()
def test_an_architecture_of_our_own_brings_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = make_byte_run(tmp_path / "run", 60, "modern")
    assert main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    assert not type(model.model).__module__.startswith("gptfit")
    ids = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(model(ids).logits, logits_of(run, ids), atol=1e-5, rtol=1e-5)
    assert model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0).shape == (2, 21)


@torch.inference_mode()
def test_stock_gpt2_weights_open_from_a_folder_with_their_own_gelu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=24, vocab_size=50257)
    assert config.activation_function == "gelu_new"
    torch.manual_seed(3)
    stock = transformers.GPT2LMHeadModel(config).eval()
    for parameter in stock.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    stock.save_pretrained(tmp_path / "stock")
    ids = torch.randint(50257, (2, 24), generator=torch.Generator().manual_seed(4))
    opened = open_model(str(tmp_path / "stock"))
    torch.testing.assert_close(opened.model.logits(ids), stock(ids).logits, atol=1e-5, rtol=1e-5)
    assert main(["sample", str(tmp_path / "stock"), "--prompt", "Hello", "--tokens", "30"]) == 0
    assert capsys.readouterr().out.startswith("Hello")
    # Out again with the GELU it came with.
    export(opened, "hf", str(tmp_path / "again"))
    assert json.loads((tmp_path / "again" / "config.json").read_text())["activation_function"] == "gelu_new"


@pytest.mark.parametrize("change", [{"activation_function": "relu"}, {"model_type": "llama"}, {"n_inner": 7}])
def test_a_folder_that_is_not_gpt2_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    export(open_model(str(bare_run(tmp_path, True))), "hf", str(tmp_path / "hf"))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=next(iter(change))):
        open_model(str(tmp_path / "hf"))


@torch.inference_mode()
def test_an_exported_folder_opens_as_the_same_model(tmp_path: Path) -> None:
    run = make_byte_run(tmp_path, 60)
    export(open_model(str(run)), "hf", str(tmp_path / "hf"))
    ids = torch.arange(16)[None]
    assert torch.equal(logits_of(run, ids), logits_of(tmp_path / "hf", ids))
    assert open_model(str(tmp_path / "hf")).tokenizer.end_of_text == 256


@pytest.fixture(params=["gpt2", "bytes", "chars"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    is_chars = request.param == "chars"
    return char_tokenizer(alphabet_table(set(TEXT))) if is_chars else load_tokenizer(request.param)


def test_transformers_tokenizer_gives_our_tokens_and_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(to_tokenizer_json(tokenizer), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = theirs.encode(TEXT, add_special_tokens=False)
    assert ids == tokenizer.encode(TEXT)
    assert theirs.decode(ids, clean_up_tokenization_spaces=False) == TEXT
    if tokenizer.end_of_text is not None:
        assert theirs.encode("a<|endoftext|>", add_special_tokens=False)[1:] == [tokenizer.end_of_text]


def test_the_merge_tables_put_every_token_together(tokenizer: Tokenizer) -> None:
    """Byte-level BPE by the book, one word at a time, as llama.cpp does it."""
    from gptfit.data.gpt2_vocabulary import byte_spelling

    tables = to_bpe_tables(tokenizer)
    ids = {token: index for index, token in enumerate(tables.tokens)}
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(tables.merges)}
    for token in set(tokenizer.encode(TEXT)):
        parts = [byte_spelling()[byte] for byte in tokenizer.pieces[token]]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), 10**9))
            if (parts[best], parts[best + 1]) not in rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        assert [ids[part] for part in parts] == [token]
    assert len(ids) == tokenizer.vocab_size


@pytest.mark.parametrize("bias", [True, False])
def test_gguf_reads_back_tensor_for_tensor(bias: bool, tmp_path: Path) -> None:
    run = bare_run(tmp_path, bias, vocab_size=257)
    (run / "run.jsonl").write_text(json.dumps({"event": "header", "dataset": {"tokenizer": "bytes"}}) + "\n")
    assert main(["export", str(run), "--to", "gguf"]) == 0
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in load_checkpoint(run).model.items():
        if name == "lm_head.weight":
            continue
        there = found.pop(gguf_name(name))
        assert list(there.shape) == list(reversed(tensor.shape))  # innermost first
        assert np.array_equal(there.data, tensor.numpy())
    assert all(name.endswith("bias") and not there.data.any() for name, there in found.items())
    assert bool(found) is not bias
    assert reader.fields["general.architecture"].contents() == "gpt2"
    assert reader.fields["gpt2.context_length"].contents() == 16
    assert reader.fields["tokenizer.ggml.eos_token_id"].contents() == 256


def test_gguf_has_gpt2s_tokens_and_names_for_the_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Any] = []  # the export's own: reading 100,000 strings takes seconds

    class Reader(gguf.GGUFReader):  # type: ignore[name-defined,misc]
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            readers.append(self)

    monkeypatch.setattr(gguf, "GGUFReader", Reader)
    export(open_model(str(bare_run(tmp_path, True))), "gguf", str(tmp_path / "m.gguf"))
    tokens, merges = (readers[0].fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    assert len(tokens.data) == 50304
    assert [tokens.contents(index) for index in (50256, 50303)] == ["<|endoftext|>", "[PAD50303]"]
    assert len(merges.data) == 50000


def test_a_larger_model_takes_longer_and_transformers_takes_its_time() -> None:
    assert expected_seconds("gguf", 124_000_000) > 2 * expected_seconds("gguf", 30_000_000) > 0
    assert expected_seconds("hf", 1000) >= 5


def test_every_gpt2_tensor_has_the_name_llama_cpp_knows() -> None:
    shape = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, bias=True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    for weight in shape.weights():
        # The package's own map from the Hugging Face names, as llama.cpp's converter uses it.
        theirs = names.get_name(weight.name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
        theirs = theirs or names.get_name(weight.name, try_suffixes=(".weight", ".bias"))
        assert gguf_name(weight.name) == theirs


def test_a_nanogpt_checkpoint_has_nanogpts_keys_only(tmp_path: Path) -> None:
    data = make_chars_data(tmp_path / "data" / "chars")
    model = tiny_model(vocab_size=len(ALPHABET))
    save_checkpoint(model, tmp_path / "run" / "ckpt.pt", dataset=str(data), arch="gpt2", sampling="epoch")
    assert main(["export", str(tmp_path / "run"), "--to", "nanogpt"]) == 0
    folder = tmp_path / "run" / "nanogpt"
    saved = torch.load(folder / "ckpt.pt", weights_only=True)
    assert set(saved) == {"model", "optimizer", "model_args", "iter_num", "best_val_loss", "config"}
    assert set(saved["model_args"]) == {"n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias"}
    assert saved["config"]["dataset"] == "chars"
    assert "sampling" not in saved["config"]
    assert all(torch.equal(tensor, saved["model"][name]) for name, tensor in model.state_dict().items())
    assert (folder / "meta.pkl").is_file()


@pytest.mark.parametrize("to", ["gguf", "nanogpt"])
def test_what_a_format_cannot_hold_is_said(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_byte_run(tmp_path, 60, "modern")
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(run), "--to", to]) == 1
    assert "export with --to hf" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_byte_run(tmp_path / "run", 60)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    for to in ("hf", "nanogpt", "gguf"):
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / "out")]) == 1
        assert str(tmp_path / "out") in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    assert main(["export", str(run), "--to", "nanogpt", "--out", str(tmp_path / "empty")]) == 0


def test_an_export_that_does_not_verify_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_byte_run(tmp_path, 60)
    before = sorted(tmp_path.rglob("*"))
    opened = open_model(str(run))
    opened.model.head = lambda hidden: opened.model.lm_head(hidden) + 0.01  # type: ignore[method-assign]
    with pytest.raises(RunError, match="other logits"):
        export(opened, "hf")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits as Linux has them")
@pytest.mark.parametrize("to", ["hf", "gguf", "nanogpt"])
def test_a_disk_that_runs_full_leaves_nothing(to: str, tmp_path: Path) -> None:
    run = make_byte_run(tmp_path, 60)
    before = sorted(tmp_path.rglob("*"))
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))\n"
    done = fork(limit + gptfit_program(["export", str(run), "--to", to]))
    _, errors = done.communicate()
    assert done.returncode == 1, errors
    assert "could not be written" in errors.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_gguf_file_that_cannot_be_written_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows removes no file that is open, and the half of one would stay."""
    opened = open_model(str(make_byte_run(tmp_path, 60)))
    handles = []

    def fail(writer: gguf.GGUFWriter) -> None:
        assert writer.fout
        handles.extend(writer.fout)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(OSError, match="No space"):
        write_gguf(opened, tmp_path / "a.gguf")
    assert [handle.closed for handle in handles] == [True]


def test_the_model_card_tells_data_recipe_curve_and_evaluation(tmp_path: Path) -> None:
    run = make_byte_run(tmp_path, 60)
    events: list[dict[str, Any]] = [{"event": "header", "tokens_per_step": 512, "device": {"name": "RTX 4070"}}]
    events += [{"event": "eval", "step": step, "train_loss": 5.0 - step / 50, "val_loss": 5.1} for step in (0, 50)]
    events += [{"event": "step", "step": 99, "loss": 3.0, "seconds": 3700.0}]
    events += [{"event": "eval", "step": 100, "train_loss": 3.0, "val_loss": 3.4333}]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["eval", str(run)]) == 0
    export(open_model(str(run)), "hf", str(tmp_path / "hf"))
    card = (tmp_path / "hf" / "README.md").read_text()
    loss = json.loads((tmp_path / "eval.json").read_text())["results"]["val_loss"]["loss"]
    for told in (
        "200 training tokens",
        "n_embd = 32",
        "of 512 tokens",
        "1 h 2 min on RTX 4070",
        f"| val_loss loss | {loss:.4f} |",
    ):
        assert told in card
    assert "| 100 | 3.0000 | 3.4333 |" in card
    assert str(tmp_path) not in card
    assert "<polyline" in (tmp_path / "hf" / "loss.svg").read_text()


def test_results_that_cannot_be_read_are_left_out_of_the_card(tmp_path: Path) -> None:
    run = make_byte_run(tmp_path, 60)
    (tmp_path / "eval.json").mkdir()
    (tmp_path / "card").mkdir()
    write_model_card(open_model(str(run)), tmp_path / "card", ("all is well",))
    assert "all is well" in (tmp_path / "card" / "README.md").read_text()


def test_a_curve_needs_two_points() -> None:
    assert loss_curve((Eval(step=0, train_loss=1.0, val_loss=1.0),)) is None
