// What is refused before it travels, and that the 64-bit comparison and the words say the same.
#include "core/collectives.h"

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/settings.h"
#include "tests/check.h"

namespace hvd {
namespace {

Request request(Kind kind, DType dtype, Shape shape) {
  Request request;
  request.kind = kind;
  request.name = "x";
  request.inputs.push_back({nullptr, dtype, std::move(shape)});
  return request;
}

void expect_refused(const Request& request, int size, const std::vector<std::string>& parts) {
  const Status status = check(request, size);
  CHECK_EQ(status.code, Code::invalid_argument);
  for (const std::string& part : parts) CHECK_CONTAINS(status.message, part);
}

constexpr DType kIntegers[] = {DType::uint8,  DType::int8,  DType::uint16, DType::int16,
                               DType::uint32, DType::int32, DType::uint64, DType::int64};
constexpr DType kFloats[] = {DType::float16, DType::bfloat16, DType::float32, DType::float64};

void dtypes_have_their_sizes_and_names() {
  const std::vector<std::pair<std::string, size_t>> expected = {
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

void roots_must_exist() {
  for (int root : {-1, 2, 100}) {
    Request broadcast = request(Kind::broadcast, DType::float32, {2});
    broadcast.root = root;
    expect_refused(broadcast, 2, {"broadcast 'x'", "root rank " + std::to_string(root), "0 to 1"});
  }
  for (int root : {0, 1}) {
    Request broadcast = request(Kind::broadcast, DType::boolean, {});
    broadcast.root = root;
    CHECK(check(broadcast, 2).ok());
  }
  Request allreduce = request(Kind::allreduce, DType::float32, {2});
  allreduce.root = 7;  // means nothing there
  CHECK(check(allreduce, 2).ok());
}

void scalars_cannot_be_gathered() {
  expect_refused(request(Kind::allgather, DType::float32, {}), 2,
                 {"allgather 'x'", "scalar", "tf.expand_dims"});
  Request second = request(Kind::allgather, DType::float32, {1});
  second.inputs.push_back({nullptr, DType::float32, {}});
  expect_refused(second, 2, {"scalar"});
  CHECK(check(request(Kind::allgather, DType::boolean, {0}), 2).ok());
  CHECK(check(request(Kind::allreduce, DType::float32, {}), 2).ok());
}

void bools_have_no_arithmetic() {
  Request bools = request(Kind::allreduce, DType::boolean, {2});
  for (Reduction reduction : {Reduction::average, Reduction::sum, Reduction::product}) {
    bools.reduction = reduction;
    expect_refused(
        bools, 2, {"allreduce 'x'", "bool", std::string("op=") + name_of(reduction), "Min", "Max"});
  }
  for (Reduction reduction : {Reduction::min, Reduction::max}) {
    bools.reduction = reduction;
    CHECK(check(bools, 2).ok());
  }
}

void integers_are_not_averaged_or_scaled() {
  for (DType dtype : kIntegers) {
    test::context = name_of(dtype);
    Request integers = request(Kind::allreduce, dtype, {2});
    CHECK(check(integers, 2).ok());
    integers.prescale = 0.5;
    expect_refused(integers, 2, {"scale factors", name_of(dtype)});
    integers.prescale = 1;
    integers.postscale = 2;
    expect_refused(integers, 2, {"scale factors", name_of(dtype)});
    integers.postscale = 1;
    integers.reduction = Reduction::average;
    expect_refused(integers, 2, {"op=Average", name_of(dtype), "op=Sum"});
  }
  for (DType dtype : kFloats) {
    Request floats = request(Kind::allreduce, dtype, {2});
    floats.reduction = Reduction::average;
    floats.prescale = floats.postscale = 0.5;
    CHECK(check(floats, 2).ok());
    floats.inputs.push_back({nullptr, DType::int32, {2}});  // one is enough
    expect_refused(floats, 2, {"int32"});
  }
  Request gathered = request(Kind::allgather, DType::int32, {2});
  gathered.reduction = Reduction::average;  // means nothing there
  CHECK(check(gathered, 2).ok());
}

void the_first_dimension_is_free_in_allgather_alone() {
  for (Kind kind : {Kind::allreduce, Kind::allgather, Kind::broadcast}) {
    const bool free = kind == Kind::allgather;
    const Request a = request(kind, DType::float32, {2, 3});
    CHECK_EQ(fingerprint(a) == fingerprint(request(kind, DType::float32, {5, 3})), free);
    CHECK_EQ(describe(a) == describe(request(kind, DType::float32, {5, 3})), free);
    for (const Shape& other : {Shape{2, 4}, Shape{2}, Shape{2, 3, 1}}) {
      CHECK(fingerprint(a) != fingerprint(request(kind, DType::float32, other)));
      CHECK(describe(a) != describe(request(kind, DType::float32, other)));
    }
  }
  CHECK_EQ(describe(request(Kind::allgather, DType::int8, {2, 3})), "int8[*,3]");
}

void descriptions_are_readable() {
  Request some = request(Kind::allreduce, DType::float32, {2, 3});
  CHECK_EQ(identity(some), "allreduce 'x'");
  CHECK_EQ(describe(some), "op=Sum float32[2,3]");
  some.reduction = Reduction::average;
  some.prescale = 0.5;
  some.postscale = 2;
  some.inputs.push_back({nullptr, DType::float16, {}});
  CHECK_EQ(describe(some),
           "op=Average prescale_factor=0.5 postscale_factor=2 float32[2,3], float16[]");
  Request broadcast = request(Kind::broadcast, DType::boolean, {0});
  broadcast.root = 1;
  CHECK_EQ(describe(broadcast), "root_rank=1 bool[0]");
}

// Ranks compare fingerprints first and, if these differ, words: were the words equal then, they
// would run together what does not fit. The choices are few, so that many pairs are equal;
// 6 and 11 are the numbers of int32 and float32 too, which must not pass for dimensions.
void fingerprints_are_equal_if_and_only_if_the_words_are() {
  std::mt19937 random(1);
  const auto any = [&random](auto... choices) {
    const std::common_type_t<decltype(choices)...> all[] = {choices...};
    return all[random() % sizeof...(choices)];
  };
  struct Seen {
    uint64_t fingerprint;
    std::string words;
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
    for (int inputs = any(0, 1, 1, 2); inputs > 0; --inputs) {
      Shape shape;
      for (int dims = any(0, 1, 2); dims > 0; --dims) shape.push_back(any(0, 1, 6, 11));
      if (made.kind == Kind::allgather && shape.empty()) shape.push_back(1);
      made.inputs.push_back({nullptr, any(DType::float32, DType::int32), shape});
    }
    seen.push_back({fingerprint(made), identity(made) + "\n" + describe(made)});
    CHECK(seen.back().fingerprint > 1);  // the engine uses smaller numbers itself
  }
  int equal = 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const bool same = seen[i].fingerprint == seen[j].fingerprint;
      if (same != (seen[i].words == seen[j].words)) {
        test::context = seen[i].words + " and " + seen[j].words;
        CHECK_EQ(same, seen[i].words == seen[j].words);
      }
      equal += same;
    }
  }
  test::context.clear();
  CHECK(equal > 1000);
}

void data_and_buffers_do_not_count() {
  Request a = request(Kind::allreduce, DType::float32, {2});
  Request b = a;
  float memory[2];
  b.inputs[0].data = memory;
  b.outputs.push_back(memory);
  CHECK_EQ(fingerprint(a), fingerprint(b));
}

void settings_come_from_the_environment() {
  const char* name = "HVD_STALL_WARNING_SECONDS";
  const auto read = [&](const char* text, Settings* settings) {
    setenv(name, text, 1);
    return read_settings(settings);
  };
  Settings settings;
  unsetenv(name);
  CHECK(read_settings(&settings).ok());
  CHECK_EQ(settings.stall_warning_seconds, 60.0);
  CHECK(read("", &settings).ok());
  CHECK_EQ(settings.stall_warning_seconds, 60.0);
  CHECK(read("2.5", &settings).ok());
  CHECK_EQ(settings.stall_warning_seconds, 2.5);
  CHECK(read("0", &settings).ok());
  CHECK_EQ(settings.stall_warning_seconds, 0.0);
  for (const char* wrong : {"soon", "5s", "-1", "inf", "nan", " "}) {
    const Status status = read(wrong, &settings);
    CHECK_EQ(status.code, Code::invalid_argument);
    CHECK_CONTAINS(status.message, name);
    CHECK_CONTAINS(status.message, std::string("'") + wrong + "'");
  }
  CHECK_EQ(settings.stall_warning_seconds, 0.0);
  unsetenv(name);
}

}  // namespace
}  // namespace hvd

int main() {
  using namespace hvd;
  return test::run({
      {"dtypes have their sizes and names", dtypes_have_their_sizes_and_names},
      {"roots must exist", roots_must_exist},
      {"scalars cannot be gathered", scalars_cannot_be_gathered},
      {"bools have no arithmetic", bools_have_no_arithmetic},
      {"integers are not averaged or scaled", integers_are_not_averaged_or_scaled},
      {"the first dimension is free in allgather alone",
       the_first_dimension_is_free_in_allgather_alone},
      {"descriptions are readable", descriptions_are_readable},
      {"fingerprints are equal if and only if the words are",
       fingerprints_are_equal_if_and_only_if_the_words_are},
      {"data and buffers do not count", data_and_buffers_do_not_count},
      {"settings come from the environment", settings_come_from_the_environment},
  });
}
