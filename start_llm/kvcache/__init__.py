"""Reuse of stored KV. Other rooms call `store.KVStore`; docs/kvcache.md tells how the files fit together."""
