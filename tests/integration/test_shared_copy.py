"""The copy that ``shared`` works on loses its room in the middle of a run: one line that names what is full."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from children import refusing

#: In a mount namespace of its own: a disk that makes reflinks, the model on it, and the program beside both.
_MOUNTED = (
    "mount -t tmpfs none $0 && truncate -s 512M $0/image && mkfs.btrfs -q -M $0/image && mkdir $0/at && "
    'mount -o loop $0/image $0/at && cp "$1" $0/at/m.gguf && shift && exec "$@"'
)
_PROGRAM = """
import contextlib, json, os, sys
import moestream
at = sys.argv[1]
os.environ["XDG_CACHE_HOME"] = f"{at}/cache"
said = []
with moestream.Llama(f"{at}/m.gguf", ram="1GiB", mechanism="shared+sync+lru", n_ctx=64, verbose=False) as llama:
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError), open(f"{at}/filling", "ab", buffering=0) as filling:
            while filling.write(bytes(size)):
                pass
            os.fsync(filling.fileno())
    for _ in range(2):
        try:
            llama.eval(list(range(1, 30)))
        except moestream.MoestreamError as error:
            said.append([type(error).__name__, str(error)])
    reflinks = llama.engagement()["reflinks"]
os.unlink(f"{at}/filling")
os.sync()
with moestream.Llama(f"{at}/m.gguf", ram="1GiB", mechanism="shared+sync+lru", n_ctx=64, verbose=False) as llama:
    llama.eval(list(range(1, 30)))
print(json.dumps({"said": said, "reflinks": reflinks, "left": os.listdir(f"{at}/cache/moestream")}))
"""


def in_a_mount_of_its_own(model: Path, place: Path) -> dict[str, Any]:
    for tool in ("unshare", "mkfs.btrfs"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} on this box")
    program = [sys.executable, "-c", _PROGRAM, str(place / "at")]
    words = ["unshare", "--mount", "sh", "-c", _MOUNTED, str(place), str(model), *program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode in (1, 32) and not done.stdout and "Traceback" not in done.stderr:
        pytest.skip(f"no mounts of our own can be had: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_disk_that_fills_up_under_a_reflink_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    result = in_a_mount_of_its_own(tiny("olmoe"), tmp_path)
    assert result["reflinks"] == 1
    assert result["left"] == []
    assert len(result["said"]) == 2
    for kind, text in result["said"]:
        assert kind == "ReadError"
        assert "\n" not in text
        assert f"the disk of {tmp_path}/at/cache/moestream is full or fails: free some space" in text


#: A process that is killed while the model is copied byte by byte, where files without a name cannot be made.
_KILLED = """
import os, signal, sys
import moestream
def progress(done, total):
    if 0 < done:
        opened = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
        print(os.listdir(sys.argv[2]), *(name for name in opened if "/shared-" in name), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
moestream.Llama(sys.argv[1], ram="1GiB", mechanism="shared", n_ctx=64, on_progress=progress)
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the numbers of openat and ioctl are not known here"
)
def test_a_kill_within_the_copy_leaves_no_file(tiny: Callable[..., Path], tmp_path: Path) -> None:
    nameless = refusing([(257, 2, 0o20000000)], errno.EOPNOTSUPP)  # of openat's flags, O_TMPFILE's own bit
    no_reflink = refusing([(16, 1, 0x40000000)], errno.EOPNOTSUPP)  # of ioctl's requests, those that write
    program = f"{nameless}\n{no_reflink}\n{_KILLED}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny("olmoe")), str(tmp_path / "moestream")],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    listed, copied = done.stdout.strip().split(maxsplit=1)
    assert listed == "[]"
    assert copied.startswith(f"{tmp_path}/moestream/shared-")
    assert copied.endswith(" (deleted)")
    assert list((tmp_path / "moestream").iterdir()) == []
