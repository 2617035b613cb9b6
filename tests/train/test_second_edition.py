"""The ingredients of the recipe's second edition, each and all together: resume, faults, cache, export, memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gptfit.checkpoint.format import load_checkpoint
from gptfit.cli import main
from gptfit.config.keys import TrainConfig
from gptfit.config.recipe import SCALARS
from gptfit.device.device import find_device
from gptfit.logs.events import Event, Step
from gptfit.model.build import build_model
from gptfit.model.cache import KVCache
from gptfit.model.modern import pair_row
from gptfit.plan import memory
from gptfit.plan.setting import Setting
from gptfit.schedule import Knobs, knobs
from gptfit.train.muon import make_muon, row_factors
from gptfit.train.optimizers import turn
from gptfit.train.train import train
from tests.generate.test_evaluate import make_byte_run
from tests.model.test_modern import EVERYTHING, SWITCHED, TINY, scrambled, tokens

MakeConfig = Callable[..., TrainConfig]
OF_THE_MODEL: list[dict[str, Any]] = [
    {"value_embeddings": "tables"},
    {"value_embeddings": "projections"},
    {"bigram": True},
    {"backout": True, "layer_scalars": True},
    {"smear_gate": True},
    {"qk_scale": 1.2, "mlp_init": 0.4},
]
OF_THE_OPTIMIZER: list[dict[str, Any]] = [
    {"normuon": True},
    {"cautious_decay": True},
    {"momentum_start": 0.85, "momentum": 0.97, "momentum_end": 0.9},
    {"embedding_beta2": 0.995},
    {"lookahead": 0.6},
    {"average_tail": 0.6},
]
WHOLE = {key: value for part in (*OF_THE_MODEL, *OF_THE_OPTIMIZER) for key, value in part.items()}
WHOLE_SCHEDULE = {"momentum_start": 0.85, "momentum": 0.97, "momentum_end": 0.9}
WHOLE["value_embeddings"] = "tables"
WHOLE_MODEL = {key: value for part in OF_THE_MODEL for key, value in part.items()}  # with projections
MODERN = {"arch": "modern", "optimizer": "muon", "schedule": "wsd", "learning_rate": 0.02, "min_lr": 0.0}


def names(changes: dict[str, Any]) -> str:
    return "-".join(changes) if len(changes) < 5 else "whole"


# One by one they are minutes; the whole has each of them but projections, which have tables' place.
ALONE = [
    pytest.param(changes, marks=pytest.mark.slow, id=names(changes)) for changes in (*OF_THE_MODEL, *OF_THE_OPTIMIZER)
]


@pytest.mark.parametrize("changes", [*ALONE, WHOLE, WHOLE | WHOLE_MODEL], ids=names)
def test_a_run_stopped_in_the_middle_ends_with_the_same_weights(
    changes: dict[str, Any], small_config: MakeConfig, tmp_path: Path
) -> None:
    common = MODERN | changes
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(small_config(out_dir=str(whole), **common))

    def interrupt(event: Event) -> None:
        if isinstance(event, Step) and event.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    assert train(small_config(out_dir=str(parts), **common), interrupt).reason == "SIGINT"
    train(small_config(out_dir=str(parts), init_from="resume", **common))
    a, b = load_checkpoint(whole), load_checkpoint(parts)
    assert a.iter_num == b.iter_num
    assert [name for name, tensor in a.model.items() if not torch.equal(tensor, b.model[name])] == []
    assert a.averaged == b.averaged
    assert [name for name, tensor in a.average.items() if not torch.equal(tensor, b.average[name])] == []


@pytest.mark.parametrize("changes", [*OF_THE_MODEL, *SWITCHED, EVERYTHING], ids=names)
@torch.inference_mode()
def test_a_cache_gives_the_logits_of_reading_everything(changes: dict[str, Any]) -> None:
    model = scrambled(replace(TINY, **changes))
    idx, cache = tokens(rows=3), KVCache(TINY, 3, 16, torch.device("cpu"), torch.float32)
    pieces = [model.logits(part, cache) for part in idx.split([4, 1, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model.logits(idx), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_the_whole_goes_to_hugging_face_with_equal_logits(
    small_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export compares them itself, in another process, with the folder's own code."""
    pytest.importorskip("transformers")
    with torch.inference_mode(False):
        data = str(make_byte_run(tmp_path / "bytes", 60) / "data")
        train(small_config(out_dir=str(tmp_path / "run"), dataset=data, max_iters=2, **MODERN | WHOLE))
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    assert "equal ours in transformers" in capsys.readouterr().out


@pytest.mark.parametrize("changes", [WHOLE_MODEL, *SWITCHED, EVERYTHING], ids=names)
@torch.inference_mode()
def test_every_ingredient_has_our_logits_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Written and read by transformers, so that no tensor is forgotten or shared; the test above has the whole way."""
    pytest.importorskip("transformers")
    from gptfit.export.hf_modelling import GptfitConfig, GptfitForCausalLM

    ours = scrambled(replace(TINY, **changes))
    theirs = GptfitForCausalLM(GptfitConfig(asdict(ours.shape), tie_word_embeddings=ours.shape.tied_head))
    theirs.model.load_state_dict(ours.state_dict())
    theirs.save_pretrained(tmp_path)
    again = GptfitForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens()).logits, ours.logits(tokens()), atol=1e-6, rtol=0)


def test_the_optimizers_state_has_the_planned_bytes() -> None:
    config = TrainConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=128, device="cpu", **MODERN, **WHOLE)
    model = build_model(config.shape())
    optimizer = make_muon(model, config, find_device(config))
    ids = torch.zeros(2, 16, dtype=torch.long)
    model(ids, ids).backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
    held = sum(tensor.nbytes for tensor in tensors)
    assert held == pytest.approx(memory.state_bytes(Setting(config.shape(), 1, optimizer="muon")), rel=0.02)


def test_tables_are_parameters_but_cost_no_flops_and_projections_do() -> None:
    plain, tables, projections = TINY, *(replace(TINY, value_embeddings=v) for v in ("tables", "projections"))
    assert plain.value_tables == projections.value_tables == 0
    assert tables.value_tables == 2 * 64 * 32  # layers 0 and 2 of 3
    assert tables.parameters - plain.parameters > tables.value_tables
    assert tables.tied_parameters - plain.tied_parameters < 100  # the gates
    assert projections.tied_parameters - plain.tied_parameters > 2 * 32 * 32
    assert replace(tables, tied_head=True).tied_parameters < replace(plain, tied_head=True).tied_parameters + 100


def test_pairs_of_tokens_spread_over_the_whole_table() -> None:
    idx = torch.arange(200)
    rows = pair_row(idx.repeat_interleave(200), idx.repeat(200), 1000)
    counts = torch.bincount(rows, minlength=1000)
    assert len(counts) == 1000
    assert counts.min() > 0
    assert counts.max() < 120  # 40 on average


def test_rows_become_equally_large_on_average_and_the_whole_stays_as_large() -> None:
    update = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 8).unsqueeze(1)
    evened = update * row_factors(update, torch.zeros(8, 1), beta=0.95)
    assert evened.norm() == pytest.approx(update.norm().item(), rel=1e-4)
    sizes = evened.norm(dim=1)
    assert sizes.max() / sizes.min() < 1.001


def test_cautious_decay_shrinks_only_what_the_update_shrinks_too() -> None:
    def moved(**changes: Any) -> list[torch.Tensor]:
        config = TrainConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=64, device="cpu", **MODERN, **changes)
        torch.manual_seed(0)
        model = build_model(config.shape())
        before = [p.detach().clone() for p in model.transformer["h"].parameters()]
        optimizer = make_muon(model, config, find_device(config))
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        turn(optimizer, knobs(config, 0))
        optimizer.step()
        return [p.detach() - b for p, b in zip(model.transformer["h"].parameters(), before, strict=True)]

    none, plain, cautious = (
        moved(weight_decay=0.0),
        moved(weight_decay=5.0),
        moved(weight_decay=5.0, cautious_decay=True),
    )
    for without, always, sometimes in zip(none, plain, cautious, strict=True):
        decayed = (sometimes - without).abs() > 1e-9
        assert 0.2 < decayed.float().mean() < 0.8
        torch.testing.assert_close(sometimes[decayed], always[decayed])


def test_momentum_rises_and_falls_and_cautious_decay_ends_at_zero() -> None:
    config = TrainConfig(max_iters=1000, lr_decay_iters=1000, warmup_iters=0, cautious_decay=True,
                         **MODERN | {"decay_fraction": 0.5}, **WHOLE_SCHEDULE)  # fmt: skip
    found = {step: knobs(config, step) for step in (0, 100, 500, 750, 1000)}
    assert [round(found[step].momentum or 0, 4) for step in found] == [0.85, 0.97, 0.97, 0.935, 0.9]
    assert [found[step].decay_share for step in found] == [1.0, 0.9, 0.5, 0.25, 0.0]
    assert knobs(TrainConfig(momentum=0.9), 77) == Knobs(knobs(TrainConfig(), 77).rate, 0.9, 1.0)


@pytest.mark.parametrize(("batch_size", "share"), [(512, 1.0), (1024, 1.0), (32, 0.25)])
def test_scalars_have_nanochats_rates_at_its_batch_and_less_at_smaller_ones(batch_size: int, share: float) -> None:
    config = TrainConfig(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, device="cpu", layer_scalars=True, **MODERN,
        batch_size=batch_size, block_size=1024, gradient_accumulation_steps=1,
    )  # fmt: skip
    model = build_model(config.shape())
    optimizer = make_muon(model, config, find_device(config))
    turn(optimizer, knobs(config.replace(warmup_iters=0), 0))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, own in SCALARS.items():
        group = groups[id(model.get_parameter(name))]
        assert group["lr"] == pytest.approx(own.rate * share)
        assert group["betas"][0] == (own.beta1 or config.beta1)
