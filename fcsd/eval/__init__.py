"""Score models: benchmark suites, code execution, comparison."""
