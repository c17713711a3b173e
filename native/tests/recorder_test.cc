// The counters, and the timeline's file, which can be read at every moment.
#include "core/engine/recorder.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>

#include "tests/support/check.h"

namespace hvd {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

std::string folder;  // of this run's files

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Whether a text is one JSON value. (Numbers are taken for what strtod reads.)
class Json {
 public:
  explicit Json(const std::string& text) : text_(text) {}
  bool valid() { return value() && (blank(), at_ == text_.size()); }

 private:
  bool value() {
    blank();
    if (at_ == text_.size()) return false;
    if (text_[at_] == '{') return list('}', true);
    if (text_[at_] == '[') return list(']', false);
    if (text_[at_] == '"') return string();
    if (text_.compare(at_, 4, "null") == 0) return at_ += 4, true;
    char* end = nullptr;
    std::strtod(text_.c_str() + at_, &end);
    const size_t next = end - text_.c_str();
    return next > at_ ? (at_ = next, true) : false;
  }
  bool list(char closing, bool named) {
    ++at_;
    if (blank(); take(closing)) return true;
    do {
      if (named && (blank(), !(string() && (blank(), take(':'))))) return false;
      if (!value()) return false;
      blank();
    } while (take(','));
    return take(closing);
  }
  bool string() {
    if (!take('"')) return false;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (static_cast<unsigned char>(text_[at_]) < 0x20) return false;
      if (text_[at_] == '\\') ++at_;
    }
    return take('"');
  }
  void blank() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_]))) ++at_;
  }
  bool take(char c) { return at_ < text_.size() && text_[at_] == c ? (++at_, true) : false; }

  const std::string& text_;
  size_t at_ = 0;
};

bool valid(const std::string& text) { return Json(text).valid(); }

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

void the_checker_knows_json() {
  for (const char* text : {"[]", " [ {\"a\" :[1.5,null , \"\\\"]\"]}\n, 2]  ", "{}"})
    CHECK(valid(text));
  for (const char* text : {"", "[", "[]]", "[1,]", "[1 2]", "{\"a\"}", "[\"\n\"]", "[{]}", "[]x"})
    CHECK(!valid(text));
}

// The format lets the closing bracket be absent.
bool valid_so_far(const std::string& text) { return !valid(text) && valid(text + "]"); }

// As a reader takes the file of a process that was killed: without a last line that is not whole.
bool valid_up_to_the_last_line(const std::string& text) {
  if (valid_so_far(text)) return true;
  const size_t end = text.rfind(",\n");
  return valid_so_far(end == std::string::npos ? "[" : text.substr(0, end));
}

// Of three ranks, of which the second waited least.
const std::vector<WaitTimes> kPasts = {
    {50'000'000, 1'000'000, 100}, {10'000'000, 2'000'000, 200}, {30'000'000, 3'000'000, 300}};

Served served(const std::string& name, uint64_t bytes = 100) {
  const auto now = Clock::now();
  return {"allreduce", name, bytes, now - milliseconds(51), now - milliseconds(1), now};
}

Agreement agreement(const std::vector<WaitTimes>& all_times) {
  Agreement agreement;
  for (size_t r = 0; r < all_times.size(); ++r)
    agreement.add(Summary({0, 0, all_times[r]}, static_cast<int>(r)));
  agreement.all_times = all_times;
  return agreement;
}

std::string host_of(int rank) { return std::string(1, static_cast<char>('a' + rank)); }

void agreed(Recorder& recorder, const std::vector<Served>& requests,
            const std::vector<WaitTimes>& all_times = kPasts) {
  recorder.agreed(0, {0, 1, 2}, host_of, requests, agreement(all_times));
}

void who_waits_least_came_last() {
  Recorder recorder(0, 3);
  recorder.served(served("x"));
  recorder.served(served("y", 11));
  agreed(recorder, {served("x")});
  agreed(recorder, {served("y")});
  const std::string stats = recorder.stats();
  CHECK(valid(stats));
  CHECK_CONTAINS(stats,
                 "\"allreduce\": {\"requests\": 2, \"bytes\": 111, \"waiting_seconds\": 0.100000, "
                 "\"moving_seconds\": 0.002000}");
  // The others waited 40 and 20 ms longer, on average 30, twice.
  CHECK_CONTAINS(stats,
                 "[{\"last\": 0, \"awaited_seconds\": 0.000000}, {\"last\": 2, "
                 "\"awaited_seconds\": 0.060000}, {\"last\": 0, ");
}

void ranks_that_come_together_are_not_late() {
  Recorder recorder(0, 3);
  agreed(recorder, {served("x")}, {{1000, 0, 0}, {90'000, 0, 0}, {50'000, 0, 0}});
  Recorder alone(0, 1);
  alone.agreed(0, {0}, host_of, {served("x")}, agreement({{1'000'000, 0, 0}}));
  CHECK_EQ(count(recorder.stats(), "\"last\": 0"), size_t{3});
  CHECK_EQ(count(alone.stats(), "\"last\": 0"), size_t{1});
}

void the_timeline_has_a_row_for_each_rank() {
  const std::string path = folder + "/rows.json";
  Recorder recorder(0, 3);
  CHECK(recorder.start_timeline(path).ok());
  std::this_thread::sleep_for(milliseconds(60));
  agreed(recorder, {served("x")});
  const std::string text = read(path);
  CHECK(valid_so_far(text));
  for (const char* rank : {"rank 0 on a", "rank 1 on b", "rank 2 on c"}) CHECK_CONTAINS(text, rank);
  CHECK_EQ(count(text, "\"wait for rank 1\""), size_t{2});
  CHECK_EQ(count(text, "\"wait\""), size_t{1});
  CHECK_EQ(count(text, "\"allreduce x\""), size_t{3});
  CHECK_EQ(count(text, "\"last_rank\":1"), size_t{6});
  for (const char* own :
       {"\"dur\":50000.000,\"args\":{\"kind\":\"allreduce\",\"name\":\"x\",\"bytes\":100,",
        "\"dur\":10000.000,\"args\":{\"kind\":\"allreduce\",\"name\":\"x\",\"bytes\":200,",
        "\"dur\":30000.000,\"args\":{\"kind\":\"allreduce\",\"name\":\"x\",\"bytes\":300,"})
    CHECK_CONTAINS(text, own);
}

void any_name_fits() {
  const std::string path = folder + "/names.json";
  Recorder recorder(0, 3);
  CHECK(recorder.start_timeline(path).ok());
  const std::string control(5000, '\x01');
  for (const std::string& name :
       {std::string("\"\\\n"), std::string("gr\xc3\xbc\xc3\x9f"), std::string("\xff\xc3 "), control,
        std::string(255, 'n') + "\xc3\xbc"})
    agreed(recorder, {served(name)});
  const std::string text = read(path);
  CHECK(valid_so_far(text));
  CHECK_CONTAINS(text, "\"name\":\"\\\"\\\\\\u000a\"");
  CHECK_CONTAINS(text, "\"name\":\"gr\xc3\xbc\xc3\x9f\"");
  CHECK_CONTAINS(text, "\"name\":\"\\ufffd\\ufffd \"");
  CHECK_CONTAINS(text, "\"name\":\"" + std::string(255, 'n') + "\\u2026\"");
}

void every_request_is_in_the_file_at_once() {
  const std::string path = folder + "/long.json";
  Recorder recorder(0, 3);
  CHECK(recorder.start_timeline(path).ok());
  CHECK(valid_so_far(read(path)));
  for (int i = 0; i < 300; ++i) {
    agreed(recorder, {served(std::string(i % 200, 'x')), served("y")});
    if (!CHECK(valid_so_far(read(path)))) break;
  }
  CHECK_EQ(count(read(path), "\"ph\":\"X\""), size_t{300 * 3 * 2 * 2});
  recorder.stop_timeline();
  CHECK(valid(read(path)));
  CHECK_EQ(count(read(path), "\"ph\":\"X\""), size_t{300 * 3 * 2 * 2});
  agreed(recorder, {served("later")});
  CHECK_EQ(count(read(path), "later"), size_t{0});
  CHECK(recorder.start_timeline(path).ok());  // begins anew
  CHECK_EQ(count(read(path), "\"ph\""), size_t{0});
}

void a_path_that_cannot_be_written() {
  Recorder recorder(0, 3);
  const Status status = recorder.start_timeline(folder + "/none/t.json");
  CHECK_EQ(status.code, Code::invalid_argument);
  CHECK_CONTAINS(status.message, "/none/t.json': No such file or directory");
  CHECK(recorder.start_timeline(folder + "/twice.json").ok());
  CHECK_CONTAINS(recorder.start_timeline(folder + "/other.json").message, "hvd.stop_timeline()");
}

void a_full_disk_ends_the_timeline_only() {
  const std::string path = folder + "/full.json";
  const rlimit small{100'000, 100'000};
  if (fork() == 0) {
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    Recorder recorder(0, 3);
    recorder.start_timeline(path);
    std::freopen("/dev/null", "w", stderr);
    for (int i = 0; i < 1000; ++i) agreed(recorder, {served("x")});
    _exit(0);
  }
  int status = -1;
  wait(&status);
  CHECK_EQ(status, 0);
  const std::string text = read(path);
  CHECK(valid_up_to_the_last_line(text));
  CHECK(count(text, "\"ph\":\"X\"") > 100);
}

void whatever_kills_the_process() {
  std::mt19937 random(1);
  size_t shortest = SIZE_MAX, longest = 0;
  for (int i = 0; i < 200; ++i) {
    const std::string path = folder + "/killed.json";
    unlink(path.c_str());
    const pid_t child = fork();
    if (child == 0) {
      Recorder recorder(0, 3);
      recorder.start_timeline(path);
      while (true) agreed(recorder, {served("x")});
    }
    while (access(path.c_str(), F_OK) != 0) std::this_thread::yield();
    std::this_thread::sleep_for(microseconds(random() % 10'000));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const std::string text = read(path);
    if (!CHECK(valid_up_to_the_last_line(text))) break;
    shortest = std::min(shortest, text.size());
    longest = std::max(longest, text.size());
  }
  CHECK(longest > shortest);  // some were killed after the file had grown
}

}  // namespace
}  // namespace hvd

int main() {
  char name[] = "/tmp/hvd-recorder-XXXXXX";
  hvd::folder = mkdtemp(name);
  const int status = hvd::test::run({
      {"the checker knows JSON", hvd::the_checker_knows_json},
      {"who waits least came last", hvd::who_waits_least_came_last},
      {"ranks that come together are not late", hvd::ranks_that_come_together_are_not_late},
      {"the timeline has a row for each rank", hvd::the_timeline_has_a_row_for_each_rank},
      {"any name fits", hvd::any_name_fits},
      {"every request is in the file at once", hvd::every_request_is_in_the_file_at_once},
      {"a path that cannot be written", hvd::a_path_that_cannot_be_written},
      {"a full disk ends the timeline only", hvd::a_full_disk_ends_the_timeline_only},
      {"whatever kills the process", hvd::whatever_kills_the_process},
  });
  for (const char* file : {"rows", "names", "long", "twice", "full", "killed"})
    unlink((hvd::folder + "/" + file + ".json").c_str());
  rmdir(hvd::folder.c_str());
  return status;
}
