"""Judges code benchmarks: extracts programs from answers, runs them in a sandbox, and compares their outputs.

A caller uses `judge.score`. It starts a separate process (`judge_process`), which forks one child per program
(`judge_worker`). The child judges that program (`one_program`) with `extraction`, `sandbox` and `comparison`.
"""
