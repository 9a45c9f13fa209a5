"""Writes the Megatron datasets of this folder, with the library's own builder, and what its own reader makes of them.

Run `python make_megatron.py` where torch and megatron-core are installed (0.16.1 was used). The files are kept in the
repository, so that tests need neither.
"""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent / "megatron"


def write(name: str, dtype: type, documents: list[list[list[int]]]) -> None:
    """Write documents of sequences, and the rows as the library reads them: the sequences of a document joined."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    prefix = str(FOLDER / name)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        tokens = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
        builder.add_document(tokens, [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    rows = [
        np.concatenate([np.empty(0, dtype), *(dataset[n] for n in range(first, last))]).tolist()
        for first, last in itertools.pairwise(bounds)
    ]
    pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int64()))}), f"{prefix}.parquet")


def main() -> None:
    """Write a dataset of each common type; and one of sentences."""
    FOLDER.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)

    def documents(count: int, most: int, high: int, sentences: int = 1) -> list[list[list[int]]]:
        return [
            [rng.integers(0, high, rng.integers(1, most)).tolist() for _ in range(rng.integers(1, sentences + 1))]
            for _ in range(count)
        ]

    write("gpt_uint16_text_document", np.uint16, documents(60, 40, 2**16))
    write("gpt_int32_text_document", np.int32, documents(30, 40, 2**31))
    write("bert_int32_text_sentence", np.int32, documents(20, 12, 30_000, sentences=5))


if __name__ == "__main__":
    main()
