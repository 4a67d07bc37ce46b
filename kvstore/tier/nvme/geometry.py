"""Geometry of NVMe: what stands before frames, and how many of them an extent has.

extent: directory (a head, a lean record per frame), then per frame a header of whole blocks and the frame itself
"""

from __future__ import annotations

from kvstore.model.replica import FrameClass, RecordFormat, aligned

HEAD_BYTES = 136  # of a frame's header: all but its token ids and checksums (``frame_header``)
DIRECTORY_HEAD_BYTES = 64  # of an extent's directory; a lean row per frame follows


def header_bytes(frame_class: FrameClass) -> int:
    """What stands before each frame, a multiple of ``FRAME_ALIGN``."""
    return aligned(HEAD_BYTES + 4 * frame_class.page_tokens + 4 * frame_class.layers)


def stride_bytes(frame_class: FrameClass) -> int:
    """From one frame of an extent to the next: header and frame."""
    return header_bytes(frame_class) + frame_class.frame_bytes


def directory_bytes(frames: int) -> int:
    """What stands before the frames of an extent: a head and a lean record row per frame."""
    return aligned(DIRECTORY_HEAD_BYTES + frames * RecordFormat(0, 0, tail=False).row_bytes)


def frames_in(extent_bytes: int, frame_class: FrameClass) -> int:
    """Frames of that class in one extent: directory, headers and frames together. 0 where not one fits.

    Worked example: 64 MiB and pages of 256 KiB: a directory of 24 KiB, 251 frames of 4 + 256 KiB, 252 KiB unused.
    """
    stride, row_bytes = stride_bytes(frame_class), frame_class.lean.row_bytes
    frames = max(0, (extent_bytes - DIRECTORY_HEAD_BYTES) // (stride + row_bytes))
    # At most one too many: the directory was not rounded up yet.
    while frames and directory_bytes(frames) + frames * stride > extent_bytes:
        frames -= 1
    return frames
