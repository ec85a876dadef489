"""Code benchmarks: extracting programs from answers, running them in a sandbox, judging their outputs."""
