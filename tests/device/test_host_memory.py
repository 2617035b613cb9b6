"""Main memory that is free, as the machine and a container's limits tell it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptfit.device import host_memory

V2 = {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 100000\ninactive_file 750000\n"}
V1 = {
    "memory/memory.limit_in_bytes": "1000000",
    "memory/memory.usage_in_bytes": "900000",
    "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 750000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_files_a_container_has_read_leave_its_memory_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str]
) -> None:
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert host_memory.free_host_bytes() == 850_000
    (tmp_path / next(name for name in files if name.endswith("stat"))).unlink()
    assert host_memory.free_host_bytes() == 100_000
