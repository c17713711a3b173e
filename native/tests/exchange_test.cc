// The collectives beyond the first three, joining, and process sets; on any number of ranks.
#include <algorithm>
#include <cmath>
#include <utility>

#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;
using test::value;
using test::with_engine;

// Rank r sends (r + 2 * to + extra) rows to each rank: not as many as it gets.
TEST(alltoall_of_different_rows) {
  with_engine([](Engine& engine) {
    for (const int64_t extra : {0, 3, 70000}) {
      const auto rows = [&](int from, int to) { return from + 2 * to + extra; };
      const auto start = [&](int from, int to) {
        int64_t start = 0;
        for (int r = 0; r < to; ++r) start += rows(from, r);
        return start;
      };
      std::vector<int64_t> splits;
      for (int r = 0; r < size; ++r) splits.push_back(rows(rank, r));
      for (const DType dtype : {DType::float32, DType::boolean, DType::bfloat16}) {
        Call call(Kind::alltoall, std::string("rows ") + name_of(dtype));
        call.add(dtype, {start(rank, size), 3}).add_splits(splits).submit(engine);
        call.expect_ok();
        std::vector<char> wanted;
        for (int from = 0; from < size; ++from) {
          const int64_t n = rows(from, rank) * 3, first = start(from, rank) * 3;
          std::vector<char> part(n * size_of(dtype));
          for (int64_t i = 0; i < n; ++i)
            test::store(dtype, value(from, 0, first + i), part.data(), i);
          wanted.insert(wanted.end(), part.begin(), part.end());
          CHECK_EQ(call.output<int64_t>(1)[from], rows(from, rank));
        }
        CHECK(call.outputs[0] == wanted);
        CHECK(call.shapes[1] == Shape{size});
      }
    }
  });
}

TEST(bad_splits_fail_on_every_rank) {
  with_engine([](Engine& engine) {
    std::vector<int64_t> splits(size, 1);
    if (rank == size - 1) splits[0] = 5;
    Call call(Kind::alltoall, "bad");
    call.add(DType::float32, {size}).add_splits(splits).submit(engine);
    call.expect_error(Code::invalid_argument,
                      {"alltoall 'bad'", "add up to " + std::to_string(size + 4)});
    Call next(Kind::allreduce, "next");
    next.add(DType::float32, {4}).submit(engine);
    next.expect_sum();
  });
}

// Rows that do not divide: the first ranks get one more.
TEST(reducescatter_of_all_sizes) {
  with_engine([](Engine& engine) {
    for (const int64_t rows : {0, 1, 2, 7, 60001}) {
      for (const Reduction reduction : {Reduction::sum, Reduction::average}) {
        Call call(Kind::reducescatter, "rows " + std::to_string(rows));
        call.request.reduction = reduction;
        call.request.prescale = reduction == Reduction::average ? size : 1.0;
        call.add(DType::float32, {rows, 9}).add(DType::float16, {rows}).submit(engine);
        const int64_t first = rows / size * rank + std::min<int64_t>(rank, rows % size);
        const int64_t mine = rows / size + (rank < rows % size ? 1 : 0);
        call.expect_output([&](size_t tensor, int64_t index) {
          int sum = 0;
          for (int r = 0; r < size; ++r)
            sum += value(r, tensor, first * (tensor == 0 ? 9 : 1) + index);
          return sum;
        });
        CHECK(call.shapes[0] == (Shape{mine, 9}));
        CHECK(call.shapes[1] == Shape{mine});
      }
    }
  });
}

// On its root, the bits of an allreduce, whichever way tensors of a size travel.
TEST(a_reduce_gives_its_root_the_bits_of_an_allreduce) {
  if (test::nccl_sums()) return;
  with_engine([](Engine& engine) {
    for (const int64_t n : {1, 5, 3000, 20'011, 700'001}) {
      for (int root = 0; root < size; ++root) {
        std::deque<Call> calls;
        for (const Reduction reduction : {Reduction::sum, Reduction::max}) {
          for (const Kind kind : {Kind::reduce, Kind::allreduce}) {
            Call& call = calls.emplace_back(kind, "bits " + std::to_string(calls.size()));
            call.request.reduction = reduction;
            call.request.root = kind == Kind::reduce ? root : 0;
            call.in_place = n % 2;
            call.add(DType::float32, {n});
            if (n != 3000) call.add(DType::bfloat16, {n}).add(DType::int64, {n / 2});
            call.change_inputs([](int r, size_t, int64_t index) {
              return 100 * std::sin(static_cast<double>(index) + 100.0 * r);
            });
          }
        }
        for (Call& call : calls) call.submit(engine);
        for (Call& call : calls) call.expect_ok();
        for (size_t i = 0; i < calls.size() && rank == root; i += 2)
          CHECK(calls[i].results() == calls[i + 1].results());
      }
    }
    Call call(Kind::reduce, "of different roots");
    call.request.root = rank;
    call.add(DType::float32, {3}).submit(engine);
    if (size > 1) call.expect_error(Code::failed_precondition, {"root_rank=0", "root_rank=1"});
  });
}

TEST(nobody_passes_a_barrier_alone) {
  with_engine([](Engine& engine) {
    const bool last = rank == size - 1;
    MPI_Barrier(MPI_COMM_WORLD);  // the last is late for the barrier, not the others for the test
    if (last) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const auto start = std::chrono::steady_clock::now();
    Call call(Kind::barrier, "");
    call.submit(engine);
    call.expect_ok();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    if (!last) CHECK(waited.count() > 0.05);
  });
}

// What Maleki et al. define, in float64, over whole vectors.
std::vector<double> adasum_of(std::vector<std::vector<double>> vectors) {
  while (vectors.size() > 1) {
    std::vector<std::vector<double>> next;
    for (size_t i = 0; i < vectors.size(); i += 2) {
      if (i + 1 == vectors.size()) {
        next.push_back(vectors[i]);
        break;
      }
      const auto &a = vectors[i], &b = vectors[i + 1];
      double ab = 0, aa = 0, bb = 0;
      for (size_t k = 0; k < a.size(); ++k) {
        ab += a[k] * b[k];
        aa += a[k] * a[k];
        bb += b[k] * b[k];
      }
      std::vector<double> sum;
      for (size_t k = 0; k < a.size(); ++k) {
        sum.push_back((aa > 0 ? 1 - ab / 2 / aa : 1) * a[k] +
                      (bb > 0 ? 1 - ab / 2 / bb : 1) * b[k]);
      }
      next.push_back(sum);
    }
    vectors = next;
  }
  return vectors[0];
}

TEST(adasum_of_several_tensors) {
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "adasum");
    call.request.reduction = Reduction::adasum;
    call.request.prescale = 0.5;
    const std::vector<int64_t> sizes = {1, 2, 1000, 0, 400001};
    for (int64_t n : sizes) call.add(DType::float32, {n});
    call.add(DType::float64, {17}).submit(engine);
    call.expect_ok();
    for (size_t tensor = 0; tensor <= sizes.size(); ++tensor) {
      const int64_t n = tensor < sizes.size() ? sizes[tensor] : 17;
      std::vector<std::vector<double>> vectors(size);
      for (int r = 0; r < size; ++r) {
        for (int64_t i = 0; i < n; ++i) vectors[r].push_back(0.5 * value(r, tensor, i));
      }
      const std::vector<double> wanted = adasum_of(vectors);
      for (int64_t i = 0; i < n; ++i) {
        const double got =
            tensor < sizes.size() ? call.output<float>(tensor)[i] : call.output<double>(tensor)[i];
        if (std::fabs(got - wanted[i]) > 1e-5 * (1 + std::fabs(wanted[i]))) {
          test::context = "tensor " + std::to_string(tensor) + ", element " + std::to_string(i);
          CHECK_EQ(got, wanted[i]);
          break;
        }
      }
    }
  });
}

// Sums that depend on the order of their terms.
// NCCL rounds factors to the dtype.
TEST(a_factor_that_float16_cannot_hold) {
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "small factor");
    call.request.prescale = 1e-8;
    call.add(DType::float16, {17});
    call.change_inputs([](int, size_t, int64_t) { return 30000.0; });
    call.submit(engine);
    call.expect_ok();
    for (int i = 0; i < 17; ++i) CHECK(call.output<uint16_t>(0)[i] != 0);
  });
}

TEST(both_transports_give_the_same_bits) {
  const auto outputs = [](const std::string& transport) {
    const std::string before = std::exchange(test::transport, transport);
    std::vector<std::vector<char>> outputs;
    with_engine([&](Engine& engine) {
      for (const Kind kind : {Kind::allreduce, Kind::reducescatter}) {
        for (const Reduction reduction : {Reduction::average, Reduction::adasum}) {
          if (kind == Kind::reducescatter && reduction == Reduction::adasum) continue;
          Call call(kind, "bits");
          call.request.reduction = reduction;
          call.request.prescale = 1 / 3.0;
          call.add(DType::float32, {300007}).add(DType::float16, {17}).add(DType::float64, {9000});
          call.change_inputs([](int r, size_t tensor, int64_t index) {
            return std::sin(static_cast<double>(index) + 100.0 * r) *
                   (static_cast<double>(tensor) + 0.1);
          });
          call.submit(engine);
          call.expect_ok();
          outputs.insert(outputs.end(), call.outputs.begin(), call.outputs.end());
        }
      }
    });
    test::transport = before;
    return outputs;
  };
  CHECK(outputs("host") == outputs("mpi"));
}

// Nor on whether tensors travelled with the proposals: those that came with unequal ones are not
// used.
TEST(bits_do_not_depend_on_the_order_of_requests) {
  if (test::nccl_sums()) return;
  with_engine([](Engine& engine) {
    constexpr int kCount = 6;
    std::vector<std::vector<std::vector<char>>> outputs;
    for (const bool same_order : {true, false}) {
      std::deque<Call> calls;
      for (int i = 0; i < kCount; ++i) {
        calls.emplace_back(Kind::allreduce, "bits " + std::to_string(i));
        calls[i].add(i % 2 ? DType::float32 : DType::bfloat16, {1 << i});
        calls[i].request.reduction = i % 3 ? Reduction::average : Reduction::sum;
        calls[i].change_inputs([&](int r, size_t, int64_t index) {
          return std::sin(static_cast<double>(index) + 100.0 * r + i);
        });
      }
      for (int i = 0; i < kCount; ++i) {
        Call& call = calls[same_order ? i : (i * (rank % 2 ? kCount - 1 : 1) + 5 * rank) % kCount];
        call.submit(engine);
        if (same_order) call.expect_ok();  // before the next
      }
      outputs.emplace_back();
      for (Call& call : calls) {
        if (!same_order) call.expect_ok();
        outputs.back().push_back(call.outputs[0]);
      }
    }
    CHECK(outputs[0] == outputs[1]);
  });
}

// Of sums that depend on the order of their terms.
TEST(a_reducescatter_gives_the_bits_of_an_allreduce) {
  // Those of NCCL and of a grid of hosts are added in another order.
  if (test::nccl_sums() || test::transport == "grid") return;
  with_engine([](Engine& engine) {
    const int64_t rows = 40009, columns = 7;
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      std::vector<std::vector<char>> outputs;
      for (const Kind kind : {Kind::allreduce, Kind::reducescatter}) {
        Call call(kind, std::string("bits ") + name_of(dtype));
        call.request.reduction = Reduction::average;
        call.request.prescale = 1 / 3.0;
        call.add(dtype, {rows, columns});
        call.change_inputs([](int r, size_t, int64_t index) {
          return std::sin(static_cast<double>(index) + 100.0 * r);
        });
        call.submit(engine);
        call.expect_ok();
        outputs.push_back(call.outputs[0]);
      }
      const int64_t first = rows / size * rank + std::min<int64_t>(rank, rows % size);
      const int64_t of_row = columns * size_of(dtype);
      CHECK(std::equal(outputs[1].begin(), outputs[1].end(), outputs[0].begin() + first * of_row));
    }
  });
}

// Rank r has r % 3 * 30000 rows, and one more.
TEST(allgather_of_different_rows) {
  with_engine([](Engine& engine) {
    const auto rows = [](int r) { return r % 3 * 30000 + 1; };
    Call call(Kind::allgather, "rows");
    call.add(DType::float32, {rows(rank), 3}).add(DType::uint8, {rank % 2, 5});
    call.submit(engine);
    call.expect_ok();
    for (size_t tensor = 0; tensor < 2; ++tensor) {
      const DType dtype = tensor == 0 ? DType::float32 : DType::uint8;
      std::vector<char> wanted;
      for (int r = 0; r < size; ++r) {
        const int64_t n = tensor == 0 ? rows(r) * 3 : r % 2 * 5;
        std::vector<char> part(n * size_of(dtype));
        for (int64_t i = 0; i < n; ++i)
          test::store(dtype, value(r, static_cast<int>(tensor), i), part.data(), i);
        wanted.insert(wanted.end(), part.begin(), part.end());
      }
      CHECK(call.outputs[tensor] == wanted);
    }
  });
}

// Rank r takes r steps and joins; the others go on without it.
TEST(ranks_that_have_joined_give_neutral_values) {
  with_engine([](Engine& engine) {
    for (int step = 0; step < rank; ++step) {
      const std::string number = std::to_string(step);
      const auto partners = [step](auto combine, double start) {
        return [=](size_t tensor, int64_t index) {
          double result = start;
          for (int r = step + 1; r < size; ++r)
            result = combine(result, static_cast<double>(value(r, tensor, index)));
          return result;
        };
      };
      Call sum(Kind::allreduce, "sum " + number), least(Kind::allreduce, "min " + number);
      Call rows(Kind::allgather, "rows " + number), parts(Kind::reducescatter, "parts " + number);
      sum.add(DType::float32, {5}).add(DType::int32, {30000}).submit(engine);
      least.request.reduction = Reduction::min;
      least.add(DType::float16, {5}).add(DType::uint8, {7}).submit(engine);
      rows.add(DType::float32, {2, 3}).add(DType::int32, {2, 3}).submit(engine);
      parts.add(DType::float32, {size, 2}).submit(engine);
      sum.expect_output(partners([](double a, double b) { return a + b; }, 0));
      least.expect_output(partners([](double a, double b) { return std::min(a, b); }, 1000));
      rows.expect_output([step](size_t tensor, int64_t index) {
        return value(step + 1 + static_cast<int>(index / 6), tensor, index % 6);
      });
      CHECK(rows.shapes[0] == (Shape{2 * (size - step - 1), 3}));
      parts.expect_output([&](size_t tensor, int64_t index) {
        return partners([](double a, double b) { return a + b; }, 0)(tensor, 2 * rank + index);
      });

      Call from_joined(Kind::broadcast, "root " + number), all(Kind::alltoall, "all " + number);
      from_joined.request.root = 0;
      from_joined.add(DType::float32, {3}).submit(engine);
      from_joined.expect_error(Code::failed_precondition, {"cannot run without rank 0", "joined"});
      all.add(DType::float32, {size}).add_splits(std::vector<int64_t>(size, 1)).submit(engine);
      all.expect_error(Code::failed_precondition, {"cannot run without rank 0", "joined"});
    }
    Call join(Kind::join, "");
    join.submit(engine);
    join.expect_ok();
    CHECK_EQ(join.output<int32_t>(0)[0], size - 1);

    Call after(Kind::allreduce, "after");  // all take part again
    after.add(DType::float32, {5}).submit(engine);
    after.expect_sum();
  });
}

TEST(the_last_to_join_is_known_to_all) {
  with_engine([](Engine& engine) {
    for (int last = 0; last < size; ++last) {
      if (rank == last && size > 1) {
        // The others have joined when this runs: they take no part in it.
        Call alone(Kind::allreduce, "alone");
        alone.add(DType::float32, {3}).submit(engine);
        alone.expect_output(
            [](size_t tensor, int64_t index) { return value(rank, tensor, index); });
      }
      Call join(Kind::join, "");
      join.submit(engine);
      join.expect_ok();
      CHECK_EQ(join.output<int32_t>(0)[0], last);
    }
  });
}

// Engines on communicators of neighbours, which overlap, beside one of all.
TEST(sets_work_independently) {
  MPI_Group all;
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::vector<int>> sets;
  for (int first = 0; first + 1 < size; ++first) sets.push_back({first, first + 1});
  for (size_t s = 0; s < sets.size(); ++s) {
    engines.emplace_back();
    if (std::find(sets[s].begin(), sets[s].end(), rank) == sets[s].end()) continue;
    MPI_Group some;
    MPI_Comm pair;
    MPI_Group_incl(all, 2, sets[s].data(), &some);
    MPI_Comm_create_group(MPI_COMM_WORLD, some, static_cast<int>(s), &pair);
    engines.back() = std::make_unique<Engine>(test::new_transport(pair, sets[s]), Settings());
    MPI_Comm_free(&pair);
    MPI_Group_free(&some);
  }
  MPI_Group_free(&all);
  const auto world = test::new_engine();

  // A request of the last set is done although one of all ranks is stuck before it.
  Call of_all(Kind::allreduce, "of all");
  of_all.add(DType::float32, {4});
  if (rank != 0) of_all.submit(*world);
  for (size_t s = sets.size(); s-- > 0;) {  // the other way round on odd ranks
    const size_t at = rank % 2 ? sets.size() - 1 - s : s;
    if (!engines[at]) continue;
    Call call(Kind::allreduce, "of a pair");
    call.add(DType::float32, {100}).submit(*engines[at]);
    call.expect_output([&](size_t tensor, int64_t index) {
      return value(sets[at][0], tensor, index) + value(sets[at][1], tensor, index);
    });
    Call root(Kind::broadcast, "root of the job");
    root.request.root = sets[at][1];
    root.add(DType::float32, {3}).submit(*engines[at]);
    root.expect_output(
        [&](size_t tensor, int64_t index) { return value(sets[at][1], tensor, index); });
  }
  if (rank == 0) of_all.submit(*world);
  of_all.expect_sum();
  for (const auto& engine : engines) {
    if (engine) CHECK_EQ(test::leave(*engine, "", -1), Engine::LeaveResult::all_left);
  }
  CHECK_EQ(test::leave(*world, "", -1), Engine::LeaveResult::all_left);
}

// More bytes than an MPI count can name: 2^31 + 4097 of the last rank, to all.
TEST(beyond_two_gibibytes) {
  // It is the same on more ranks, and they would not fit; of a GPU it would be the host's memory.
  if (size != 2 || test::device) return;
  with_engine([](Engine& engine) {
    const int64_t n = (int64_t{1} << 31) + 4097;
    const bool last = rank == size - 1;
    std::vector<char> bytes(last ? n : 0);
    for (int64_t i = 0; last && i < n; i += 4099) bytes[i] = static_cast<char>(i % 127);
    std::vector<char> out;
    std::promise<Status> promise;
    Request request;
    request.kind = Kind::allgather;
    request.name = "large";
    request.inputs.push_back({bytes.data(), DType::uint8, {static_cast<int64_t>(bytes.size())}});
    request.allocate = [&](size_t, const Shape& shape, void** data) {
      out.resize(shape[0]);
      *data = out.data();
      return Status();
    };
    request.done = [&](const Status& status) { promise.set_value(status); };
    engine.submit(request);
    CHECK_EQ(promise.get_future().get().message, "");
    CHECK_EQ(static_cast<int64_t>(out.size()), n);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i += 4099) wrong += out[i] != static_cast<char>(i % 127);
    CHECK_EQ(wrong, int64_t{0});
  });
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
