"""The benchmark of fcsd's inference engine: degrees, wirings, batches and all-reduce backends."""
