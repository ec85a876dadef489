// The functions of the library that the tests call; it stands behind sums.cu.
typedef unsigned long long A;
extern "C" {
void set_aside(int microseconds) { aside = microseconds; }
int run_one_shot(int grid, A x, A y, int count, int from, int to, int gather, A places, A slot, int rank, A calls, A control, A limit) {
  return run(grid, [=] { one_shot((uint2*)x, (uint2*)y, count, from, to, gather, (Places*)places, slot, rank, (u32*)calls, (Control*)control, limit); });
}
int run_in_blocks(int grid, A x, A y, int count, int gather, int shares, A places, A slot, int rank, A calls, A control, A limit) {
  return run(grid, [=] { in_blocks((Line*)x, (Line*)y, count, gather, shares, (Places*)places, slot, rank, (u32*)calls, (Control*)control, limit); });
}
int run_in_codes(int grid, A x, A y, int count, A places, A slot, int rank, A calls, A control, A limit) {
  return run(grid, [=] { in_codes((Line*)x, (Line*)y, count, (Places*)places, slot, rank, (u32*)calls, (Control*)control, limit); });
}
int run_announce(int grid, A flag, A calls) { return run(1, [=] { announce((char*)flag, (u32*)calls); }); }
int run_await_all(int grid, A flag, A region, int rank, A calls, u32 back, A control, A limit) {
  return run(1, [=] { await_all((char*)flag, region, rank, (u32*)calls, back, (Control*)control, limit); });
}
int run_finish(int grid, A flag, A pieces, int count, A calls) {
  return run(1, [=] { finish((char*)flag, (char*)pieces, count, (u32*)calls); });
}
int run_add_parts(int grid, A own, A others, A y, int count, int rank) {
  return run(1, [=] { add_parts((Line*)own, (Line*)others, (Line*)y, count, rank); });
}
}
