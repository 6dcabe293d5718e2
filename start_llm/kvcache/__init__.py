"""Reuse of stored KV. Everything here runs on the model thread, but for the disk thread inside `disk`.

`store` is the door: `lookup`, `pauses`, `restore`, `put`. Behind it, one idea a file:

- `config`: the fixed settings
- `tree`: what is stored, as segments of token paths; common prefixes are shared
- `planner`: how far a prompt can be restored, where its prefill should pause (pure)
- `layers`: how a model's caches are cut, copied and rebuilt; the only file that knows MLX
- `sessions`: which conversation ends are protected, and how strongly
- `held`: what of the tree is in memory, and its bytes
- `budget`: what to give up first (pure); `evict` does it
- `paging`, `disk`, `diskfolder`, `diskindex`: the same KV in files that outlive the process
- `blocks`, `pieces`, `stats`: tokens and their hash chain, the nouns, the counters
"""
