// The algorithms between hosts on 2, 3, … of the ranks, each as a host: all dtypes and reductions,
// any number of elements, several exchanges at once.
#include "core/cpu/inter_host.h"

#include <mpi.h>

#include <thread>

#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::rank;
using test::size;

constexpr Allreduce kAlgorithms[] = {Allreduce::direct, Allreduce::grid};

// From 1 to 3, so that the results for a few hosts are exact. Of bools only a 3 is true.
double term(int host, int64_t index) {
  return 1 + static_cast<double>((5 * host + index + host * index) % 3);
}

double expected(Reduction reduction, int hosts, int64_t index) {
  double result = term(0, index);
  for (int h = 1; h < hosts; ++h) {
    const double next = term(h, index);
    if (reduction == Reduction::min) result = std::min(result, next);
    if (reduction == Reduction::max) result = std::max(result, next);
    if (reduction == Reduction::product) result *= next;
    if (reduction == Reduction::sum || reduction == Reduction::average) result += next;
  }
  return reduction == Reduction::average ? result / 2 : result;
}

struct Exchange {
  Exchange(Allreduce algorithm, MPI_Comm hosts, DType dtype, Reduction reduction, int64_t n,
           int tag)
      : dtype(dtype), reduction(reduction), n(n), data(n * size_of(dtype) + 1, '\x55') {
    for (int64_t i = 0; i < n; ++i) test::store(dtype, term(rank, i), data.data(), i);
    Factors factors;
    if (reduction == Reduction::average) factors.divisor = 2;  // stays exact
    work = new_inter_host_allreduce(algorithm, hosts, {data.data(), n, dtype, reduction, factors},
                                    tag);
  }

  void check(int hosts, Allreduce algorithm) const {
    test::context = std::to_string(hosts) + " hosts, algorithm " + test::shown(algorithm) + ", " +
                    std::to_string(n) + " elements of " + name_of(dtype);
    std::vector<char> wanted(data.size(), '\x55');
    for (int64_t i = 0; i < n; ++i)
      test::store(dtype, expected(reduction, hosts, i), wanted.data(), i);
    CHECK(data == wanted);
  }

  DType dtype;
  Reduction reduction;
  int64_t n;
  std::vector<char> data;
  std::unique_ptr<InterHostExchange> work;
};

TEST(all_dtypes_and_lengths) {
  for (int hosts = 2; hosts <= size; ++hosts) {
    MPI_Comm some;
    MPI_Comm_split(MPI_COMM_WORLD, rank < hosts ? 0 : MPI_UNDEFINED, rank, &some);
    if (rank >= hosts) continue;
    for (const Allreduce algorithm : kAlgorithms) {
      std::vector<Exchange> at_once;
      const auto add = [&](DType dtype, Reduction reduction, int64_t n) {
        at_once.emplace_back(algorithm, some, dtype, reduction, n,
                             static_cast<int>(2 * at_once.size()));
      };
      for (int d = static_cast<int>(DType::uint8); d <= static_cast<int>(DType::float64); ++d)
        add(static_cast<DType>(d), Reduction::sum, 37 + d);
      for (const int64_t n : {0, 1, hosts - 1, hosts + 1, 70001})
        add(DType::float32, Reduction::sum, n);
      for (const DType dtype : {DType::float64, DType::float16})
        add(dtype, Reduction::average, 1001);
      add(DType::boolean, Reduction::max, 77);
      add(DType::int16, Reduction::min, 999);
      add(DType::float64, Reduction::product, 555);
      for (bool all = false; !all;) {
        all = true;
        for (const Exchange& one : at_once) {
          one.work->advance();
          all &= one.work->done();
        }
        std::this_thread::yield();
      }
      for (const Exchange& one : at_once) one.check(hosts, algorithm);
    }
    MPI_Comm_free(&some);
  }
}

TEST(many_hosts_form_a_grid) {
  CHECK_EQ(algorithm_for(Allreduce::automatic, 31), Allreduce::direct);
  CHECK_EQ(algorithm_for(Allreduce::automatic, 32), Allreduce::grid);
  CHECK_EQ(algorithm_for(Allreduce::direct, 1000), Allreduce::direct);
  CHECK_EQ(most_rounded(Allreduce::direct, 1000), 1);
  // Of a group: at most one host more than the root.
  const std::pair<int, int> most[] = {{4, 2}, {64, 8}, {32, 4}, {30, 5}, {5, 3}, {31, 6}, {1, 1}};
  for (const auto& [hosts, members] : most) CHECK_EQ(most_rounded(Allreduce::grid, hosts), members);
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
