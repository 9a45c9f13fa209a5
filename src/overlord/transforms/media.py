"""Opening media: items decoded side by side, each into its place. In a SourceLoader or in a DataConstructor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from overlord.core.messages import Media
from overlord.core.ragged import offsets_of
from overlord.transforms.per_sample import Fault, Int64s, MediaDecoder, MediaFault, Workers

Place = npt.NDArray[np.uint8]


def decode_media(media: Media, decoder: MediaDecoder, workers: Workers) -> tuple[Media, list[Fault]]:
    """Return the media decoded into one array, and (item, reason) of those that do not decode."""
    if not media.encoded:
        return media, []
    sizes = decoder.item_bytes(media.grids)
    offsets = offsets_of(sizes)
    values = np.empty(int(offsets[-1]), np.uint8)
    places = [values[begin : begin + size] for begin, size in zip(offsets.tolist(), sizes.tolist(), strict=False)]
    faults = decode_into(media, np.arange(len(sizes)), decoder, places, workers)
    bad = media.bad.copy()
    bad[[item for item, _ in faults]] = True
    done = dataclasses.replace(media, values=values, begin=offsets[:-1], nbytes_of=sizes, bad=bad, encoded=False)
    return done, faults


def decode_into(
    media: Media, items: Int64s, decoder: MediaDecoder, places: Sequence[Place], workers: Workers
) -> list[Fault]:
    """Decode some items into their places; return (item, reason) of those that do not decode: they are zeros."""

    def prepare(at: int) -> list[Fault]:
        item, place = int(items[at]), places[at]
        if media.bad[item]:
            place[:] = 0
            return []
        try:
            decoder.decode(media.data(item), media.grids[item], int(media.seeds[item]), place)
        except MediaFault as fault:
            place[:] = 0
            return [(item, str(fault))]
        return []

    return [fault for found in workers.map(prepare, range(len(items))) for fault in found]
