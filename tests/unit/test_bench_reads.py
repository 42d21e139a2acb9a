"""What a run's process keeps of the kernel's accounts, phase by phase, from a tree that stands for a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moestream.lab.bench_reads import Accounts


def tell(root: Path, read: int, written: int, sectors: int) -> None:
    files = {
        "proc/self/io": f"rchar: 1\nread_bytes: {read}\nwrite_bytes: {written}\n",
        "proc/self/mountinfo": "31 25 254:0 / / rw - ext4 /dev/vda rw\n",
        "sys/dev/block/254:0/stat": f" 10 0 {sectors} 7 0 0 0 0 0 0 0\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_each_phase_has_what_every_account_counted_in_it(tmp_path: Path) -> None:
    tell(tmp_path, read=100, written=7, sectors=1000)
    accounts = Accounts(Path("/m.gguf"), tmp_path)
    tell(tmp_path, read=150, written=7, sectors=1010)
    accounts.end("load")
    accounts.end("prefill")
    tell(tmp_path, read=175, written=4103, sectors=1011)
    accounts.end("decode")
    document: dict[str, Any] = {"load": {"seconds": 1.0}}
    accounts.put_into(document)
    assert document == {
        "load": {"seconds": 1.0, "read_bytes_os": 50},
        "read_accounts": {
            "load": {"process": 50, "device": 5120},
            "prefill": {"process": 0, "device": 0},
            "decode": {"process": 25, "device": 512},
        },
        "write_bytes_os": 4096,
    }


def test_a_kernel_that_keeps_no_account(tmp_path: Path) -> None:
    accounts = Accounts(Path("/m.gguf"), tmp_path)
    for phase in ("load", "prefill", "decode"):
        accounts.end(phase)
    document: dict[str, Any] = {"load": {}}
    accounts.put_into(document)
    assert document["read_accounts"] == {"load": {}, "prefill": {}, "decode": {}}
    assert document["write_bytes_os"] is None
