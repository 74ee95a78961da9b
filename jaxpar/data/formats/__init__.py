"""File formats: each a module that plans the pieces of a file and reads one piece.

```
plan(file, text_key) -> [Piece, ...]     in the first process; finds what is wrong with the file
read(piece, text_key) -> Rows, ...       in a worker; a piece is read in blocks, never whole
```

| kind | files | row |
|---|---|---|
| text | anything else | the file is one document |
| jsonl | .jsonl, .ndjson, .json, also .gz and .zst | a line |
| parquet | .parquet, .pq | a row |
| arrayrecord | .arrayrecord, .array_record | a record: text, or a JSON object |
| huggingface | a folder that `datasets` saved | a row |
| megatron | .bin with .idx | a document of token ids |
| nanogpt | .bin | token ids, cut behind the tokenizer's end token |
"""
