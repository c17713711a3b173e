// Makes each call of MPI that the core makes. tests/unit/test_mpi_faults.py lets them fail. What
// this program itself calls has another name, so that it does not count.
#include "core/process_sets.h"
#include "core/world.h"
#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;

template <typename Target>
void run_requests(Target& target, int process_set) {
  const auto sum_of = [&](const std::string& name, int64_t elements) {
    Call call(Kind::allreduce, name);
    call.request.process_set = process_set;
    call.add(DType::float32, {elements}).submit(target);
    call.expect_sum();
  };
  sum_of("small", 4);
  sum_of("large", 300'000);
  Call rows(Kind::allgather, "rows"), values(Kind::broadcast, "values");
  Call parts(Kind::alltoall, "parts"), sums(Kind::reducescatter, "sums");
  for (Call* call : {&rows, &values, &parts, &sums}) {
    call->request.process_set = process_set;
    call->add(DType::float32, {size, 3});
    if (call == &parts) call->add_splits(std::vector<int64_t>(size, 1));
    call->submit(target);
    call->expect_ok();
  }
  // The others tell each other that they wait.
  if (rank == size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  sum_of("late", 4);
}

void run_engine(std::unique_ptr<Transport> transport) {
  Engine engine(std::move(transport), Settings());
  run_requests(engine, 0);
  CHECK_EQ(test::leave(engine, "", -1), Engine::LeaveResult::all_left);
}

TEST(all_calls_of_mpi) {
  World& world = World::instance();
  CHECK_EQ(world.init({}, nullptr).message, "");
  rank = world.rank_info().rank;
  size = world.rank_info().size;
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  CHECK_EQ(world.add_process_set(1, all).message, "");
  run_requests(process_sets(), 1);
  world.remove_process_set(1);
  run_engine(std::make_unique<MpiTransport>(MPI_COMM_WORLD, all, 1));
  MPI_Comm host;
  PMPI_Comm_split(MPI_COMM_WORLD, rank / 2, rank, &host);
  auto mpi = std::make_unique<MpiTransport>(MPI_COMM_WORLD, all);
  run_engine(std::make_unique<ClusterTransport>(&mpi, host, Allreduce::automatic));
  PMPI_Comm_free(&host);
  CHECK_EQ(world.leave("", -1), Engine::LeaveResult::all_left);
  world.finalize(true);
}

}  // namespace
}  // namespace hvd

int main(int argc, char**) {
  if (argc > 1) {  // as mpi4py does before
    int level;
    PMPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  }
  const int status = hvd::test::run();
  if (argc > 1) PMPI_Finalize();
  return status;
}
