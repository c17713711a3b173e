// The engine over MPI, on any number of ranks: data, order and errors. leave_test.cc has the ends.
#include "core/engine/engine.h"

#include <algorithm>
#include <thread>

#include "tests/support/test_call.h"

namespace hvd {
namespace {

using test::Call;
using test::rank;
using test::size;
using test::value;
using test::with_engine;

std::string numbered(const std::string& name, int64_t i) { return name + std::to_string(i); }

// Around the thresholds of transports: 8 KiB that travel with a proposal, 16 KiB in one message, or
// 32 or 64; chunks of up to 4 MiB.
constexpr int64_t kSizes[] = {
    0,       1,    2,     5,    2048, 2049, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1,
    9 << 18, 8191, 16384, 16385};

TEST(allreduce_of_all_sizes) {
  with_engine([](Engine& engine) {
    for (const int64_t n : kSizes) {
      Call call(Kind::allreduce, numbered("size ", n));
      call.add(DType::float32, {n}).submit(engine);
      call.expect_sum();
    }
  });
}

TEST(allreduce_of_several_tensors) {
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "several");
    for (const int64_t n : kSizes) call.add(DType::float32, {n});
    call.add(DType::float32, {0}).add(DType::float32, {3, 0, 2}).add(DType::float32, {});
    call.submit(engine);
    call.expect_sum();

    Call none(Kind::allreduce, "none");
    none.submit(engine);
    none.expect_ok();
  });
}

TEST(allreduce_of_mixed_dtypes) {
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "mixed");
    for (const int64_t n : {3, 5000, 0, 1}) {
      for (int dtype = static_cast<int>(DType::uint8); dtype <= static_cast<int>(DType::float64);
           ++dtype) {
        call.add(static_cast<DType>(dtype), {n, 2});
      }
    }
    call.submit(engine);
    call.expect_sum();
  });
}

TEST(allreduce_with_all_reductions) {
  with_engine([](Engine& engine) {
    for (const int64_t n : {int64_t{7}, int64_t{5000}}) {
      const auto start = [&](Call& call, Reduction reduction, std::vector<DType> dtypes) {
        call.request.reduction = reduction;
        for (const DType dtype : dtypes) call.add(dtype, {n});
        call.submit(engine);
      };
      Call average(Kind::allreduce, "average"), least(Kind::allreduce, "min"),
          greatest(Kind::allreduce, "max");
      Call product(Kind::allreduce, "product"), both(Kind::allreduce, "and"),
          either(Kind::allreduce, "or");
      average.request.prescale = static_cast<double>(size);  // the average is a whole number then
      average.request.postscale = 0.5;
      start(average, Reduction::average,
            {DType::float32, DType::float64, DType::float16, DType::bfloat16});
      start(least, Reduction::min, {DType::int8, DType::float16});
      start(greatest, Reduction::max, {DType::uint64, DType::bfloat16});
      start(product, Reduction::product, {DType::float32, DType::int16});
      start(both, Reduction::min, {DType::boolean});
      start(either, Reduction::max, {DType::boolean});

      const auto folded = [](auto combine) {
        return [combine](size_t tensor, int64_t index) {
          double result = value(0, tensor, index);
          for (int r = 1; r < size; ++r)
            result = combine(result, static_cast<double>(value(r, tensor, index)));
          return result;
        };
      };
      const auto sum = folded([](double a, double b) { return a + b; });
      average.expect_output([&](size_t tensor, int64_t index) { return sum(tensor, index) / 2; });
      least.expect_output(folded([](double a, double b) { return std::min(a, b); }));
      greatest.expect_output(folded([](double a, double b) { return std::max(a, b); }));
      product.expect_output(folded([](double a, double b) { return a * b; }));
      // A bool is true where the number is a multiple of 3: 0 stands for true, 1 for false.
      const auto count_true = [](size_t tensor, int64_t index) {
        int count = 0;
        for (int r = 0; r < size; ++r) count += value(r, tensor, index) % 3 == 0;
        return count;
      };
      both.expect_output(
          [&](size_t tensor, int64_t index) { return count_true(tensor, index) == size ? 0 : 1; });
      either.expect_output(
          [&](size_t tensor, int64_t index) { return count_true(tensor, index) > 0 ? 0 : 1; });
    }
  });
}

// Values that neither float16 nor bfloat16 hold, of every size and dtype.
TEST(allreduce_of_rounded_tensors) {
  const bool grid = test::transport == "grid" && size > 1;
  const bool hosts_are_one = !grid && (test::transport.substr(0, 7) != "cluster" || size <= 2);
  with_engine([grid, hosts_are_one](Engine& engine) {
    const auto rounded = [](test::Format format, double number) {
      return value_of(format, nearest(format, number));
    };
    const auto term = [](int r, size_t tensor, int64_t index) {
      return (r + 1) / 3.0 + value(r, tensor, index) * 1.01;
    };
    for (const DType wire : {DType::float16, DType::bfloat16}) {
      const test::Format format = wire == DType::float16 ? test::kFloat16 : test::kBFloat16;
      for (const bool in_place : {false, true}) {
        Call call(Kind::allreduce, "rounded");
        call.request.wire = wire;
        call.request.prescale = 0.5;
        call.request.postscale = 4;
        call.in_place = in_place;
        for (const int64_t n : {int64_t{3}, int64_t{0}, int64_t{1} << 19, int64_t{4097}}) {
          for (const DType dtype : {DType::float32, DType::float64, wire}) call.add(dtype, {n});
        }
        call.change_inputs(term);
        call.submit(engine);
        call.expect_output([&](size_t tensor, int64_t index) {
          float sum = 0, of_host = 0, of_group = 0;
          for (int r = 0; r < size; ++r) {
            const double number =
                term(r, tensor, index);  // a float32 is one that was rounded before
            const double stored = tensor % 3 == 0 ? static_cast<float>(number) : number;
            of_host += static_cast<float>(rounded(format, stored)) * 0.5f;
            const bool next_is_here = hosts_are_one || (!grid && r % 2 == 0);
            if (next_is_here && r + 1 < size) continue;
            // What is sent between hosts is rounded once more, and between groups of them again.
            of_group += hosts_are_one ? of_host : static_cast<float>(rounded(format, of_host));
            of_host = 0;
            if (grid && r % 2 == 0) continue;
            sum += grid ? static_cast<float>(rounded(format, of_group)) : of_group;
            of_group = 0;
          }
          return rounded(format, sum * 4);
        });
      }
    }

    Call mixed(Kind::allreduce, "what is not wider stays");
    mixed.request.wire = DType::float16;
    mixed.add(DType::int32, {70001}).add(DType::bfloat16, {70001}).add(DType::float32, {70001});
    mixed.submit(engine);
    mixed.expect_sum();
  });
}

TEST(allreduce_in_place) {
  with_engine([](Engine& engine) {
    Call call(Kind::allreduce, "in place");
    call.in_place = true;
    call.add(DType::float32, {10}).add(DType::int64, {(1 << 19) + 1}).submit(engine);
    call.expect_sum();
  });
}

// Rank r gives (r + extra) rows, so that a rank may give none.
TEST(allgather_of_different_rows) {
  with_engine([](Engine& engine) {
    const int64_t extras[] = {0, 1, 100000};
    Call call(Kind::allgather, "rows");
    for (const int64_t extra : extras) {
      call.add(DType::int32, {rank + extra, 3})
          .add(DType::boolean, {rank + extra})
          .add(DType::float64, {rank, 0});
    }
    call.submit(engine);
    call.expect_output([&](size_t tensor, int64_t index) {
      const int64_t width = tensor % 3 == 0 ? 3 : 1;
      int from = 0;
      while (index >= (from + extras[tensor / 3]) * width)
        index -= (from++ + extras[tensor / 3]) * width;
      return value(from, tensor, index);
    });
    const int64_t ranks_before = size * (size - 1) / 2;
    for (size_t i = 0; i < 3; ++i) {
      const int64_t rows = ranks_before + size * extras[i];
      CHECK(call.shapes[3 * i] == (Shape{rows, 3}));
      CHECK(call.shapes[3 * i + 1] == (Shape{rows}));
      CHECK(call.shapes[3 * i + 2] == (Shape{ranks_before, 0}));
    }
  });
}

TEST(allgather_without_memory_on_one_rank) {
  with_engine([](Engine& engine) {
    Call call(Kind::allgather, "big");
    call.refuse_memory = rank == size - 1;
    call.add(DType::float32, {2}).add(DType::float32, {3}).submit(engine);
    if (rank == size - 1) {
      call.expect_error(Code::internal, {"no memory"});
    } else {
      call.expect_error(Code::aborted,
                        {"rank " + std::to_string(size - 1) + " could not allocate", "'big'"});
    }
    Call next(Kind::allreduce, "next");
    next.add(DType::float32, {5}).submit(engine);
    next.expect_sum();
  });
}

TEST(broadcast_from_every_root) {
  with_engine([](Engine& engine) {
    for (int root = 0; root < size; ++root) {
      for (const bool in_place : {false, true}) {
        Call call(Kind::broadcast, numbered("root ", root));
        call.request.root = root;
        call.in_place = in_place;
        call.add(DType::float32, {})
            .add(DType::boolean, {7})
            .add(DType::float16, {0})
            .add(DType::int64, {9 << 17});
        call.submit(engine);
        call.expect_output(
            [root](size_t tensor, int64_t index) { return value(root, tensor, index); });
      }
    }
  });
}

// Each rank begins elsewhere in the list; sizes differ by name, so that a mix-up is seen.
TEST(every_order_completes) {
  with_engine([](Engine& engine) {
    constexpr int kCount = 12;
    for (int round = 0; round < 10; ++round) {
      std::deque<Call> calls;
      for (int i = 0; i < kCount; ++i) {
        calls.emplace_back(i % 3 ? Kind::allreduce : Kind::broadcast, numbered("order ", i));
        calls.back().add(i % 2 ? DType::float32 : DType::int32, {100 + i});
      }
      for (int i = 0; i < kCount; ++i)
        calls[(i * (rank % 2 ? kCount - 1 : 1) + 5 * rank + round) % kCount].submit(engine);
      for (int i = 0; i < kCount; ++i) {
        if (i % 3) {
          calls[i].expect_sum();
        } else {
          calls[i].expect_output(
              [](size_t tensor, int64_t index) { return value(0, tensor, index); });
        }
      }
    }
  });
}

// The same name again before the first is done: the k-th of one rank is the k-th of the others.
TEST(equal_names_keep_their_order) {
  with_engine([](Engine& engine) {
    std::deque<Call> calls;
    for (int i = 0; i < 6; ++i) {
      calls.emplace_back(Kind::allreduce, "again");
      calls.back().add(DType::float32, {10 + i}).submit(engine);
    }
    for (Call& call : calls) call.expect_sum();
  });
}

void expect_refused_everywhere(Engine& engine, Call& call,
                               const std::function<std::string(int)>& signature_of) {
  call.submit(engine);
  if (size == 1) return call.expect_ok();
  std::vector<std::string> parts = {"'" + call.request.name + "' differs between ranks"};
  for (int r = 0; r < size; ++r)
    parts.push_back("rank " + std::to_string(r) + ": " + signature_of(r));
  call.expect_error(Code::failed_precondition, parts);
  Call next(Kind::allreduce, call.request.name);  // the same name may be used at once
  next.add(DType::float32, {4}).submit(engine);
  next.expect_sum();
}

TEST(disagreements_fail_on_every_rank) {
  with_engine([](Engine& engine) {
    Call shape(Kind::allreduce, "shape");
    shape.add(DType::float32, {rank + 1, 2});
    expect_refused_everywhere(
        engine, shape, [](int r) { return "op=Sum float32[" + std::to_string(r + 1) + ",2]"; });

    const bool last = rank == size - 1;
    Call dtype(Kind::allreduce, "dtype");
    dtype.add(last ? DType::int32 : DType::float32, {2});
    expect_refused_everywhere(engine, dtype, [](int r) {
      return r == size - 1 ? "op=Sum int32[2]" : "op=Sum float32[2]";
    });

    Call reduction(Kind::allreduce, "op");
    reduction.request.reduction = last ? Reduction::max : Reduction::min;
    reduction.add(DType::float32, {2});
    expect_refused_everywhere(engine, reduction,
                              [](int r) { return r == size - 1 ? "op=Max" : "op=Min"; });

    Call factor(Kind::allreduce, "factor");  // equal in the first ten digits
    factor.request.prescale = last ? 0.33333333333 : 1 / 3.0;
    factor.add(DType::float32, {2});
    expect_refused_everywhere(engine, factor, [](int r) {
      return r == size - 1 ? "op=Sum prescale_factor=0.33333333332"
                           : "op=Sum prescale_factor=0.33333333333333";
    });

    Call wire(Kind::allreduce, "wire");
    wire.request.wire = last ? DType::float16 : DType::float64;
    wire.add(DType::float32, {2});
    expect_refused_everywhere(engine, wire, [](int r) {
      return r == size - 1 ? "op=Sum compression=float16 float32[2]" : "op=Sum float32[2]";
    });

    Call root(Kind::broadcast, "root");
    root.request.root = last ? size - 1 : 0;
    root.add(DType::float32, {2});
    expect_refused_everywhere(
        engine, root, [](int r) { return "root_rank=" + std::to_string(r == size - 1 ? r : 0); });

    Call columns(Kind::allgather, "columns");
    columns.add(DType::float32, {2, rank + 1});
    expect_refused_everywhere(engine, columns,
                              [](int r) { return "float32[*," + std::to_string(r + 1) + "]"; });
  });
}

// What one rank cannot run fails on all, at once.
TEST(impossible_requests_fail_on_every_rank) {
  with_engine([](Engine& engine) {
    const bool last = rank == size - 1;
    Call call(Kind::broadcast, "impossible");
    call.request.root = last ? size : 0;
    call.add(DType::float32, {2}).submit(engine);
    call.expect_error(Code::invalid_argument, {"root rank " + std::to_string(size)});

    Call everywhere(Kind::allgather, "scalar");
    everywhere.add(DType::float32, {}).submit(engine);
    everywhere.expect_error(Code::invalid_argument, {"allgather 'scalar'", "got a scalar"});

    Call next(Kind::allreduce, "next");
    next.add(DType::float32, {4}).submit(engine);
    next.expect_sum();
  });
}

TEST(threads_submit_at_once) {
  with_engine([](Engine& engine) {
    test::in_threads(4, [&](int t) {
      std::deque<Call> calls;
      for (int i = 0; i < 40; ++i) {
        calls.emplace_back(Kind::allreduce,
                           "thread " + std::to_string(t) + "." + std::to_string(i));
        calls.back().add(DType::float32, {1 + t + i}).add(DType::int32, {t}).submit(engine);
        if (i % 4 == t) calls.back().expect_sum();
      }
      for (int i = 0; i < 40; ++i) {
        if (i % 4 != t) calls[i].expect_sum();
      }
    });
  });
}

// As TensorFlow does it, whose next op may start within done().
TEST(done_may_submit_the_next) {
  with_engine([](Engine& engine) {
    std::deque<Call> calls;
    for (int i = 0; i < 5; ++i) {
      calls.emplace_back(Kind::allreduce, numbered("chain ", i));
      calls.back().add(DType::float32, {20 + i});
    }
    for (int i = 0; i + 1 < 5; ++i) {
      calls[i].then = [&engine, &calls, i] { calls[i + 1].submit(engine); };
    }
    calls[0].submit(engine);
    for (Call& call : calls) call.expect_sum();
  });
}

TEST(agreements_tell_who_waited_least) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto transport = test::new_transport(MPI_COMM_WORLD, ranks);
  const Waiting patient = [](double, const Missing&) { return std::string(); };
  for (int first = 0; first < size; ++first) {
    const auto waited = [&](int r) -> uint64_t { return r == first ? 10 : 1000 + r * r; };
    for (int odd = -1; odd < size; ++odd) {  // the rank that proposes something else
      Proposal mine;
      mine.fingerprint = rank == odd ? 8 : 7;
      if (rank == first) mine.flags = Proposal::several_sets;
      mine.waited_ns = waited(rank);
      const Summary all = *transport->agree(mine, nullptr, patient);
      uint64_t together = 0;
      for (int r = 0; r < size; ++r) together += waited(r);
      CHECK_EQ(all.all_propose(mine.fingerprint), odd < 0 || size == 1);
      CHECK_EQ(all.flags, uint64_t{Proposal::several_sets});
      CHECK_EQ(all.waited, together);
      CHECK_EQ(all.waited_least, 10U);
      CHECK_EQ(all.last, static_cast<uint64_t>(first));
    }
  }
}

TEST(two_engines_do_not_interfere) {
  const auto a = test::new_engine();
  const auto b = test::new_engine();
  Call in_a(Kind::allreduce, "same name"), in_b(Kind::allreduce, "same name");
  in_a.add(DType::float32, {6});
  in_b.add(DType::int32, {8});
  if (rank % 2 == 0) in_a.submit(*a);
  in_b.submit(*b);
  if (rank % 2 == 1) in_a.submit(*a);
  in_a.expect_sum();
  in_b.expect_sum();
  CHECK_EQ(test::leave(*b, "", -1), Engine::LeaveResult::all_left);
  CHECK_EQ(test::leave(*a, "", -1), Engine::LeaveResult::all_left);
}

// float16 ends at 65504. A sum of the ranks of one host would be beyond that, their average is not.
TEST(averages_of_large_float16) {
  with_engine([](Engine& engine) {
    const auto term = [](int r, size_t, int64_t i) { return 60000 - 64 * r - 1024 * (i % 3); };
    const auto mean = [&](size_t tensor, int64_t i) {
      double sum = 0;
      for (int r = 0; r < size; ++r) sum += term(r, tensor, i);
      return sum / size;
    };
    for (const bool scaled : {false, true}) {
      Call call(Kind::allreduce, scaled ? "scaled sum" : "average");
      call.request.reduction = scaled ? Reduction::sum : Reduction::average;
      if (scaled) call.request.postscale = 1.0 / size;
      call.add(DType::float16, {1000}).add(DType::float16, {300000});
      call.change_inputs(term);
      call.submit(engine);
      if (test::nccl_sums() || (scaled && (size & (size - 1)) != 0)) {
        call.expect_ok();  // a third of a whole number is rounded
        CHECK((call.output<uint16_t>(0)[0] & 0x7c00) != 0x7c00);
      } else {
        call.expect_output(mean);
      }
    }
  });
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::test::run_with_mpi(argc, argv); }
