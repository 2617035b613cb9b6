"""lm-evaluation-harness offline: on a run through our scoring, and on its export through transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.generate.test_evaluate import make_byte_run

HAS_HARNESS = all(find_spec(name) for name in ("lm_eval", "accelerate", "transformers"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_HARNESS, reason="needs pip install 'gptfit[eval,hf]'")]

QUESTIONS = [
    {"question": "The cat sat on the", "choices": ["mat", "stone", "kernel"], "answer": 0},
    {"question": "Rain falls from the", "choices": ["desk", "sky", "cup"], "answer": 1},
    {"question": "Two and two make", "choices": ["four", "seventeen", "blue"], "answer": 0},
    {"question": "A dog can", "choices": ["bark", "photosynthesise", "compile"], "answer": 0},
]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "local_choice.yaml").write_text(TASK.format(data=data))
    return folder


def run_offline(words: list[str], tmp_path: Path, repo: Path) -> str:
    """In a process of its own: the harness reads these variables when it is imported."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=repo, env=os.environ | offline)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_the_harness_finds_the_same_on_a_run_and_on_its_export(
    arch: str, tmp_path: Path, tasks: Path, repo: Path
) -> None:
    run, export = make_byte_run(tmp_path / "run", 60, arch), tmp_path / "hf"
    words = [sys.executable, "-m", "gptfit"]
    own = ["eval", str(run), "--tasks", "local_choice", "--tasks-folder", str(tasks), "--json"]
    ours = json.loads(run_offline([*words, *own], tmp_path, repo))["lm_eval/local_choice"]
    run_offline([*words, "export", str(run), "--to", "hf", "--out", str(export)], tmp_path, repo)
    script = (
        "import json, sys, lm_eval\nfrom lm_eval.tasks import TaskManager\n"
        "found = lm_eval.simple_evaluate('hf', model_args={'pretrained': sys.argv[1], 'trust_remote_code': True, "
        "'dtype': 'float32', 'max_length': 16}, tasks=['local_choice'], device='cpu', "
        "task_manager=TaskManager(include_path=sys.argv[2]), bootstrap_iters=0)\n"
        "print('RESULT', json.dumps(found['results']['local_choice'], default=str))\n"
    )
    out = run_offline([sys.executable, "-c", script, str(export), str(tasks)], tmp_path, repo)
    theirs = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT"))[7:])
    assert theirs["acc,none"] == ours["acc"]
    assert theirs["acc_norm,none"] == ours["acc_norm"]
