"""Names people and drivers use find the right card, and never a sibling."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from gptfit.errors import DeviceError
from gptfit.gpus import all_gpus, find


@pytest.mark.parametrize(("name", "expected"), [
    ("NVIDIA GeForce RTX 4070", "RTX 4070 12GB"),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop 8GB"),
    ("NVIDIA GeForce RTX 4070 SUPER", "RTX 4070 SUPER 12GB"),
    ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti 12GB"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER 16GB"),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
    ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
    ("NVIDIA A100-PCIE-40GB", "A100 40GB (SXM/PCIe)"),
    ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
    ("NVIDIA H100 PCIe", "H100 PCIe 80GB"),
    ("Tesla T4", "T4"),
    ("Tesla V100-SXM2-32GB", "V100 SXM2 32GB"),
    ("NVIDIA RTX A4000", "RTX A4000 16GB"),
    ("NVIDIA A40", "A40 48GB"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell WS 96GB"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
    ("NVIDIA GH200 480GB", "GH200"),
    ("4070", "RTX 4070 12GB"),
    ("4070ti", "RTX 4070 Ti 12GB"),
    ("rtx 4070 ti super", "RTX 4070 Ti SUPER 16GB"),
    ("RTX4090", "RTX 4090 24GB"),
    ("4060 ti 16gb", "RTX 4060 Ti 16GB"),
    ("3090", "RTX 3090"),
    ("gtx 1080 ti", "GTX 1080 Ti"),
    ("h100", "H100 SXM 80GB"),
])  # fmt: skip
def test_find_knows_what_torch_nvidia_smi_and_people_say(name: str, expected: str) -> None:
    assert find(name).name == expected


def test_every_row_is_found_by_its_own_name() -> None:
    assert [find(gpu.name).name for gpu in all_gpus()] == [gpu.name for gpu in all_gpus()]


def test_memory_size_decides_between_variants() -> None:
    assert find("NVIDIA GeForce RTX 4060 Ti", vram_gib=15.6).name == "RTX 4060 Ti 16GB"
    assert find("NVIDIA GeForce RTX 4060 Ti", vram_gib=7.6).name == "RTX 4060 Ti 8GB"
    assert find("RTX 4060 Ti").name == "RTX 4060 Ti 8GB"


@pytest.mark.parametrize(
    "name", ["RTX 4071", "A10G", "RTX 6000", "GTX 4070", "RTX 3080 Max-Q", "", "gpu", "A400", "4070 4080"]
)
def test_unknown_is_an_error_and_not_a_guess(name: str) -> None:
    with pytest.raises(DeviceError, match="not in the table"):
        find(name)


def test_unknown_names_the_nearest() -> None:
    with pytest.raises(DeviceError, match=r"RTX 4070 12GB"):
        find("RTX 4071")
    with pytest.raises(DeviceError, match=r"nearest: RTX 4070 12GB.*`gptfit gpus` shows it"):
        find("4O70")  # the letter


def test_every_row_has_a_source_and_a_confidence() -> None:
    for gpu in all_gpus():
        assert gpu.source, gpu.name
        assert gpu.confidence in ("high", "medium", "low"), gpu.name


def test_every_card_of_the_facts_is_in_the_table(shared: Path) -> None:
    with open(shared / "facts" / "gpus.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gpu = find(row["name"])
            assert f"{gpu.bandwidth_gbs:g}" == f"{float(row['mem_bandwidth_gbs']):g}", row["name"]
            spec = row["bf16_fp16_tensor_fp32acc_dense_tflops"]
            assert gpu.bf16_tflops == (float(spec) if spec else None), row["name"]
