"""The two schemas of tokenised text with metadata, *quality* and *policy*: columns, and which may be null.

Column names are the interface to tasks: a dataset with the same names trains with the same task. Metadata columns may
hold nulls; `input_ids` and labels never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Suffixes of the files that `data import rows` and `data import images` take."""
TOKENS = pa.field("input_ids", pa.list_(pa.int32()), nullable=False)

QUALITY_LABEL = "label"
QUALITY_NUMERIC = ("prompt_length", "response_length")
QUALITY_CATEGORICAL = ("language", "source_surface", "model_family")
QUALITY_CLASSES = ("good", "bad")

POLICY_LABEL = "violation_class"
POLICY_NUMERIC = ("num_chars", "num_lines", "code_share", "nesting_depth", "num_arguments", "source_bytes")
POLICY_CATEGORICAL = ("kind", "visibility", "area", "style")

# Eleven classes with a long tail, the most frequent first.
LONG_TAIL = (0.41, 0.20, 0.12, 0.08, 0.06, 0.045, 0.033, 0.023, 0.016, 0.010, 0.003)


@dataclass(frozen=True, slots=True)
class Schema:
    """A named schema: its columns in order, the label column, and the metadata columns by kind."""

    name: str
    columns: pa.Schema
    label: str
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]


def _text_schema(name: str, label: str, numeric: tuple[str, ...], categorical: tuple[str, ...]) -> Schema:
    columns = [
        TOKENS,
        *(pa.field(column, pa.float64()) for column in numeric),
        *(pa.field(column, pa.string()) for column in categorical),
        pa.field(label, pa.int32(), nullable=False),
    ]
    return Schema(name, pa.schema(columns), label, numeric, categorical)


POLICY = _text_schema("policy", POLICY_LABEL, POLICY_NUMERIC, POLICY_CATEGORICAL)
# A user's own text, and the user's label.
PLAIN = _text_schema("custom", "label", (), ())
QUALITY = Schema(
    "quality",
    pa.schema(
        [
            TOKENS,
            pa.field("language", pa.string()),
            pa.field("source_surface", pa.string()),
            pa.field("prompt_length", pa.int32()),
            pa.field("response_length", pa.int32()),
            pa.field("model_family", pa.string()),
            pa.field(QUALITY_LABEL, pa.int32(), nullable=False),
            pa.field("shard_id", pa.int32(), nullable=False),
            pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
        ]
    ),
    QUALITY_LABEL,
    QUALITY_NUMERIC,
    QUALITY_CATEGORICAL,
)
SCHEMAS = {schema.name: schema for schema in (QUALITY, POLICY)}
