"""Code benchmarks: extract programs from answers, run them in a sandbox, compare their outputs with the right ones.

A caller uses `judge.score`. It starts a process of its own (`judge_process`), which forks one child per program
(`judge_worker`); the child judges that program (`one_program`) with `extraction`, `sandbox` and `comparison`.
"""
