"""Rows of copies to a GPU: one line where there is none, and what they copy, on the peer in host memory."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from click.testing import CliRunner

from kvstore.bench.harness import BenchFailed, Kind
from kvstore.bench.hbm import CopiedFrames, copy_and_wait, lines
from kvstore.bench.rows import ROWS
from kvstore.bench.stage import RunSettings, Stage
from kvstore.cli.bench import bench
from kvstore.device import cuda
from kvstore.device.host_device import HostDevice

LENGTH, NBYTES = 4096, 64 << 10


def test_without_a_gpu_a_row_is_one_line() -> None:
    names = [name for name in ROWS if name.startswith("hbm_")]
    assert len(names) == 6
    missing = cuda.find().missing
    if missing:
        said = CliRunner().invoke(bench, ["--quick", *names])
        assert said.exit_code == 0, said.output
        assert all(f"{name}: not measured, {missing}\n" in said.output for name in names)
    else:
        said = CliRunner().invoke(bench, ["--quick", "hbm_read_64k", "hbm_write_64k", "hbm_both_2m"])
        assert said.exit_code == 0, said.output


def test_every_frame_comes_there_and_back() -> None:
    with closing(CopiedFrames(HostDevice(), LENGTH, NBYTES)) as frames:
        frames.verify()
        assert int(frames.to_host[2].sum()) == NBYTES == int(frames.plain()[2][0])
        for ends in (*frames.to_host[:2], *frames.to_device[:2]):
            assert len(set(ends.tolist())) == NBYTES // LENGTH
            assert not (np.diff(ends.astype(np.int64)) == LENGTH).all()
        targets, sources, lengths = frames.to_host
        frames.to_host = targets, np.roll(sources, 1), lengths  # each comes from where another lies
        with pytest.raises(BenchFailed, match="changed bytes"):
            frames.verify()


def test_ours_and_the_ways_stand_against_the_plain_copy() -> None:
    with closing(CopiedFrames(HostDevice(), LENGTH, NBYTES)) as frames:
        ways = {"limit": frames.plain(), "ours": frames.to_device, "engines": frames.to_device}
        variants = {
            way: lambda _, pieces=pieces: copy_and_wait(frames.stream, frames.stream.copy, pieces)
            for way, pieces in ways.items()
        }
        found = lines(Stage(RunSettings(rounds=1, quick=True)), "hbm_x", None, variants, NBYTES)
    assert [(line.name, line.kind, line.limit_is) for line in found] == [
        ("hbm_x", Kind.SPEED, "one plain pinned copy"),
        ("hbm_x.engines", Kind.SPEED, "one plain pinned copy"),
    ]
