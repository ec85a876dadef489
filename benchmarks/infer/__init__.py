"""The benchmark of fcsd's inference engine: more degrees, wirings and backends than ``fcsd bench serve`` takes."""
