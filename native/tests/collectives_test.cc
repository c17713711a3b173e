// Requests that are refused before they run; fingerprints and texts compare equal for the same
// requests.
#include "core/request/collectives.h"

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/base/settings.h"
#include "tests/support/check.h"

namespace hvd {
namespace {

Request request(Kind kind, DType dtype, Shape shape) {
  Request request;
  request.kind = kind;
  request.name = "x";
  request.inputs.push_back({nullptr, dtype, std::move(shape)});
  return request;
}

const std::vector<int> kTwo = {0, 1};

void expect_refused(const Request& request, const std::vector<int>& ranks,
                    const std::vector<std::string>& parts) {
  for (const std::string& part : parts) CHECK_CONTAINS(problem(request, ranks), part);
}

constexpr DType kIntegers[] = {DType::uint8,  DType::int8,  DType::uint16, DType::int16,
                               DType::uint32, DType::int32, DType::uint64, DType::int64};
constexpr DType kFloats[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

TEST(dtypes_have_their_sizes_and_names) {
  const std::vector<std::pair<std::string, int64_t>> expected = {
      {"bool", 1},     {"uint8", 1},   {"int8", 1},   {"uint16", 2}, {"int16", 2},
      {"uint32", 4},   {"int32", 4},   {"uint64", 8}, {"int64", 8},  {"float16", 2},
      {"bfloat16", 2}, {"float32", 4}, {"float64", 8}};
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK_EQ(name_of(static_cast<DType>(i)), expected[i].first);
    CHECK_EQ(size_of(static_cast<DType>(i)), expected[i].second);
  }
  CHECK_EQ(elements({}), int64_t{1});
  CHECK_EQ(elements({3, 0, 5}), int64_t{0});
  CHECK_EQ(elements({3000000000, 3}), int64_t{9000000000});
  CHECK_EQ((Input{nullptr, DType::float64, {2, 3}}).bytes(), size_t{48});
}

TEST(roots_must_exist) {
  for (int root : {-1, 2, 100}) {
    Request broadcast = request(Kind::broadcast, DType::float32, {2});
    broadcast.root = root;
    expect_refused(broadcast, kTwo, {"root rank " + std::to_string(root), "0, 1"});
  }
  for (int root : {0, 1}) {
    Request broadcast = request(Kind::broadcast, DType::boolean, {});
    broadcast.root = root;
    CHECK_EQ(problem(broadcast, kTwo), "");
  }
  Request allreduce = request(Kind::allreduce, DType::float32, {2});
  allreduce.root = 7;  // means nothing there
  CHECK_EQ(problem(allreduce, kTwo), "");
}

TEST(roots_are_ranks_of_the_job) {
  Request broadcast = request(Kind::broadcast, DType::float32, {2});
  broadcast.root = 5;
  CHECK_EQ(problem(broadcast, {3, 5}), "");
  broadcast.root = 1;  // of the set, but none of its ranks
  expect_refused(broadcast, {3, 5}, {"root rank 1", "3, 5"});
}

TEST(splits_must_add_up) {
  const auto with = [](std::vector<int64_t> splits, DType dtype = DType::int64) {
    static std::vector<int64_t> kept;
    kept = std::move(splits);
    Request alltoall = request(Kind::alltoall, DType::float32, {5, 2});
    alltoall.inputs.push_back({kept.data(), dtype, {static_cast<int64_t>(kept.size())}});
    return problem(alltoall, kTwo);
  };
  CHECK_EQ(with({2, 3}), "");
  CHECK_EQ(with({5, 0}), "");
  CHECK_CONTAINS(with({2, 2}), "add up to 4 rows, and a tensor of 5");
  CHECK_CONTAINS(with({6, -1}), "a split of -1");
  CHECK_CONTAINS(with({5}), "got 1 splits, expected 2");
  CHECK_CONTAINS(with({2, 3, 0}), "got 3 splits, expected 2");
}

TEST(headers_survive_the_way_through_bytes) {
  Request made = request(Kind::reducescatter, DType::bfloat16, {7, 0, 2});
  made.inputs.push_back({nullptr, DType::boolean, {}});
  made.reduction = Reduction::average;
  made.prescale = 1 / 3.0;
  made.postscale = -2;
  made.root = 3;
  made.wire = DType::bfloat16;
  const Request copy = decode_header(encode_header(made));
  CHECK_EQ(identity(copy), identity(made));
  CHECK_EQ(describe(copy), describe(made));
  CHECK_EQ(copy.root, 3);
  CHECK_EQ(fingerprint(copy, ""), fingerprint(made, ""));
  CHECK(fingerprint(copy, "") != fingerprint(copy, "a problem"));
}

TEST(scalars_cannot_be_gathered) {
  expect_refused(request(Kind::allgather, DType::float32, {}), kTwo, {"scalar", "tf.expand_dims"});
  Request second = request(Kind::allgather, DType::float32, {1});
  second.inputs.push_back({nullptr, DType::float32, {}});
  expect_refused(second, kTwo, {"scalar"});
  CHECK_EQ(problem(request(Kind::allgather, DType::boolean, {0}), kTwo), "");
  CHECK_EQ(problem(request(Kind::allreduce, DType::float32, {}), kTwo), "");
}

TEST(bools_have_no_arithmetic) {
  Request bools = request(Kind::allreduce, DType::boolean, {2});
  for (Reduction reduction : {Reduction::average, Reduction::sum, Reduction::product}) {
    bools.reduction = reduction;
    expect_refused(bools, kTwo, {"bool", std::string("op=") + name_of(reduction), "Min", "Max"});
  }
  for (Reduction reduction : {Reduction::min, Reduction::max}) {
    bools.reduction = reduction;
    CHECK_EQ(problem(bools, kTwo), "");
  }
}

TEST(integers_are_not_averaged_or_scaled) {
  for (DType dtype : kIntegers) {
    test::context = name_of(dtype);
    Request integers = request(Kind::allreduce, dtype, {2});
    CHECK_EQ(problem(integers, kTwo), "");
    integers.prescale = 0.5;
    expect_refused(integers, kTwo, {"scale factors", name_of(dtype)});
    integers.prescale = 1;
    integers.postscale = 2;
    expect_refused(integers, kTwo, {"scale factors", name_of(dtype)});
    integers.postscale = 1;
    integers.reduction = Reduction::average;
    expect_refused(integers, kTwo, {"op=Average", name_of(dtype), "op=Sum"});
  }
  for (DType dtype : kFloats) {
    Request floats = request(Kind::allreduce, dtype, {2});
    floats.reduction = Reduction::average;
    floats.prescale = floats.postscale = 0.5;
    CHECK_EQ(problem(floats, kTwo), "");
    floats.inputs.push_back({nullptr, DType::int32, {2}});  // one is enough
    expect_refused(floats, kTwo, {"int32"});
  }
  Request gathered = request(Kind::allgather, DType::int32, {2});
  gathered.reduction = Reduction::average;  // means nothing there
  CHECK_EQ(problem(gathered, kTwo), "");
}

TEST(only_wider_floats_are_compressed) {
  Request some = request(Kind::allreduce, DType::float32, {2});
  for (DType dtype : kFloats) CHECK_EQ(on_the_wire(some, dtype), dtype);
  some.wire = DType::bfloat16;
  for (DType dtype : {DType::bfloat16, DType::float32, DType::float64})
    CHECK_EQ(on_the_wire(some, dtype), DType::bfloat16);
  CHECK_EQ(on_the_wire(some, DType::float16), DType::float16);
  for (DType dtype : kIntegers) CHECK_EQ(on_the_wire(some, dtype), dtype);
  CHECK_EQ(problem(some, kTwo), "");
  some.reduction = Reduction::adasum;
  expect_refused(some, kTwo, {"compression=bfloat16", "Adasum"});
  some.kind = Kind::reducescatter;
  some.reduction = Reduction::sum;
  expect_refused(some, kTwo, {"compression=bfloat16"});
}

TEST(the_first_dimension_is_free_in_allgather_alone) {
  for (Kind kind : {Kind::allreduce, Kind::allgather, Kind::broadcast, Kind::reducescatter}) {
    const bool free = kind == Kind::allgather;
    const Request a = request(kind, DType::float32, {2, 3});
    CHECK_EQ(fingerprint(a, "") == fingerprint(request(kind, DType::float32, {5, 3}), ""), free);
    CHECK_EQ(describe(a) == describe(request(kind, DType::float32, {5, 3})), free);
    for (const Shape& other : {Shape{2, 4}, Shape{2}, Shape{2, 3, 1}}) {
      CHECK(fingerprint(a, "") != fingerprint(request(kind, DType::float32, other), ""));
      CHECK(describe(a) != describe(request(kind, DType::float32, other)));
    }
  }
  CHECK_EQ(describe(request(Kind::allgather, DType::int8, {2, 3})), "int8[*,3]");
}

TEST(descriptions_are_readable) {
  Request some = request(Kind::allreduce, DType::float32, {2, 3});
  CHECK_EQ(identity(some), "allreduce 'x'");
  CHECK_EQ(describe(some), "op=Sum float32[2,3]");
  some.reduction = Reduction::average;
  some.prescale = 0.5;
  some.postscale = 2;
  some.inputs.push_back({nullptr, DType::float16, {}});
  CHECK_EQ(describe(some),
           "op=Average prescale_factor=0.5 postscale_factor=2 float32[2,3], float16[]");
  some.reduction = Reduction::sum;
  some.prescale = some.postscale = 1;
  some.wire = DType::float16;
  CHECK_EQ(describe(some), "op=Sum compression=float16 float32[2,3], float16[]");
  Request broadcast = request(Kind::broadcast, DType::boolean, {0});
  broadcast.root = 1;
  CHECK_EQ(describe(broadcast), "root_rank=1 bool[0]");
}

// Ranks compare fingerprints first and, if these differ, texts: were the texts equal then, they
// would run together what does not fit. The choices are few, so that many pairs are equal;
// 6 and 11 are the numbers of int32 and float32 too, which must not pass for dimensions.
TEST(fingerprints_are_equal_if_and_only_if_the_texts_are) {
  std::mt19937 random(1);
  const auto any = [&random](auto... choices) {
    const std::common_type_t<decltype(choices)...> all[] = {choices...};
    return all[random() % sizeof...(choices)];
  };
  struct Seen {
    uint64_t fingerprint;
    std::string texts;
  };
  std::vector<Seen> seen;
  for (int i = 0; i < 3000; ++i) {
    Request made;
    made.kind = any(Kind::allreduce, Kind::allgather, Kind::broadcast);
    made.name = any("a", "b", "a'");
    made.reduction = any(Reduction::sum, Reduction::max);
    made.prescale = any(1.0, 1.0, 1.0, 1 / 3.0, 0.333333333, 1 + 1e-12, -0.0, 0.0);
    made.postscale = any(1.0, 1.0, 1.0, 0.1, 1e-300);
    made.root = any(0, 1);
    made.wire = any(DType::float64, DType::float64, DType::bfloat16);
    for (int inputs = any(0, 1, 1, 2); inputs > 0; --inputs) {
      Shape shape;
      for (int dims = any(0, 1, 2); dims > 0; --dims) shape.push_back(any(0, 1, 6, 11));
      if (made.kind == Kind::allgather && shape.empty()) shape.push_back(1);
      made.inputs.push_back({nullptr, any(DType::float32, DType::int32), shape});
    }
    seen.push_back({fingerprint(made, ""), identity(made) + "\n" + describe(made)});
    CHECK(seen.back().fingerprint > 1);  // the engine uses smaller numbers itself
  }
  int equal = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const bool same = seen[i].fingerprint == seen[j].fingerprint;
      if (same != (seen[i].texts == seen[j].texts)) {
        test::context = seen[i].texts + " and " + seen[j].texts;
        CHECK_EQ(same, seen[i].texts == seen[j].texts);
      }
      equal += same;
    }
  }
  test::context.clear();
  CHECK(equal > 1000);
}

TEST(data_and_buffers_do_not_count) {
  Request a = request(Kind::allreduce, DType::float32, {2});
  Request b = a;
  float memory[2];
  b.inputs[0].data = memory;
  b.outputs.push_back(memory);
  CHECK_EQ(fingerprint(a, ""), fingerprint(b, ""));
}

TEST(settings_come_from_the_environment) {
  struct Variable {
    const char* name;
    double Settings::* value;
    double unset;
  };
  for (const Variable& variable :
       {Variable{"HVD_STALL_WARNING_SECONDS", &Settings::stall_warning_seconds, 60.0},
        Variable{"HVD_TIMEOUT_SECONDS", &Settings::timeout_seconds, 600.0},
        Variable{"HVD_FIRST_TIMEOUT_SECONDS", &Settings::first_timeout_seconds, 1800.0}}) {
    test::context = variable.name;
    const auto read = [&](const char* text, Settings* settings) {
      setenv(variable.name, text, 1);
      return read_settings(settings);
    };
    Settings settings;
    unsetenv(variable.name);
    CHECK(read_settings(&settings).ok());
    CHECK_EQ(settings.*variable.value, variable.unset);
    CHECK(read("", &settings).ok());
    CHECK_EQ(settings.*variable.value, variable.unset);
    CHECK(read("2.5", &settings).ok());
    CHECK_EQ(settings.*variable.value, 2.5);
    CHECK(read("0", &settings).ok());
    CHECK_EQ(settings.*variable.value, 0.0);
    for (const char* wrong : {"soon", "5s", "-1", "inf", "nan", " "}) {
      const Status status = read(wrong, &settings);
      CHECK_EQ(status.code, Code::invalid_argument);
      CHECK_CONTAINS(status.message, variable.name);
      CHECK_CONTAINS(status.message, std::string("'") + wrong + "'");
    }
    CHECK_EQ(settings.*variable.value, 0.0);
    unsetenv(variable.name);
  }
}

}  // namespace
}  // namespace hvd

int main() { return hvd::test::run(); }
