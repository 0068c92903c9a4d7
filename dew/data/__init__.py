"""Host-side data: tokenizers and chats, rows of tokens, and streams of global batches.

`language_rows` makes rows from texts, prompts with responses, or chats, and
`Dataset.from_records` makes a data set of them.
"""

from dew.data.dataset import Dataset
from dew.data.text import Tokenizer
from dew.data.tokens import RowReport, language_rows

__all__ = ["Dataset", "RowReport", "Tokenizer", "language_rows"]
