"""Judges code benchmarks: extracts programs from answers, runs them in a sandbox, and compares their outputs.

A caller uses `judge.score`. It starts a separate process (`judge_worker`), which forks one child per program. The
child finds the program (`extraction`), runs it (`sandbox`, and inside of it `sandbox_runner`), and lets EvalPlus'
checker compare what comes out. EvalPlus itself would compare in the program's own process, where a program can pass by
returning an object that equals everything, by reading the expected values, or by changing the checker.
"""
