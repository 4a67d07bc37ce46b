"""Geometry of an NVMe extent: the sizes of its directory and headers, and its number of frames.

extent: directory (a head, a lean record per frame), then for each frame a header of entire blocks and the frame itself
"""

from __future__ import annotations

from kvstore.model.replica import FrameClass, aligned

HEAD_BYTES = 136  # size of a frame's header without its token ids and checksums (``frame_header``)
DIRECTORY_HEAD_BYTES = 64  # size of the head of an extent's directory; a lean row per frame follows


def header_bytes(frame_class: FrameClass) -> int:
    """Return the size in bytes of the header before each frame, a multiple of ``FRAME_ALIGN``."""
    return aligned(HEAD_BYTES + 4 * frame_class.page_tokens + 4 * frame_class.layers)


def stride_bytes(frame_class: FrameClass) -> int:
    """Return the distance in bytes from one frame of an extent to the next: header and frame."""
    return header_bytes(frame_class) + frame_class.frame_bytes


def directory_bytes(frame_class: FrameClass, frames: int) -> int:
    """Return the size in bytes of the directory before an extent's frames: a head, and a lean record row per frame."""
    return aligned(DIRECTORY_HEAD_BYTES + frames * frame_class.lean.row_bytes)


def frames_in(extent_bytes: int, frame_class: FrameClass) -> int:
    """Return how many frames of this class fit in an extent, with directory and headers; 0 if not even one fits.

    Worked example: an extent of 64 MiB and pages of 256 KiB have a directory of 24 KiB, 251 frames of 4 + 256 KiB, and
    252 KiB unused.
    """
    stride, row_bytes = stride_bytes(frame_class), frame_class.lean.row_bytes
    frames = max(0, (extent_bytes - DIRECTORY_HEAD_BYTES) // (stride + row_bytes))
    # This may be one too many, because the directory was not rounded up yet.
    while frames and directory_bytes(frame_class, frames) + frames * stride > extent_bytes:
        frames -= 1
    return frames
