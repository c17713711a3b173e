#include "core/cpu/mpi_wait.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/base/process_wide.h"

namespace hvd {
namespace {

// Back-off: a rank that is as fast as the others never sleeps; one that waits for long uses hardly
// any CPU, and oversleeps by a small fraction of its wait.
constexpr double kSpinSeconds = 200e-6;
constexpr double kMaxSleepSeconds = 1e-3;

// By which answers to a call of the roll may be late.
constexpr double kLateAnswerSeconds = 2.0;

// After which one of many ranks tells the next one what it knows: longer than a rank sleeps.
constexpr double kPassOnSeconds = 20e-3;

// How long a rank that aborts lets MPI send the reason.
constexpr double kSendReasonSeconds = 0.1;

// How long a thread that submits waits for the other ranks, per step of an exchange: some latencies
// of a network. While other threads use its core, the time does not count: ranks that share a core
// need longer.
constexpr double kBriefSeconds = 200e-6;

// MPI itself yields to other ranks where it knows that they share a core, so this is for others.
constexpr int kPollsPerYield = 16;

constexpr int kAnswers = 1;  // to a call of the roll
constexpr int kAborted = 2;  // the reason

struct ProcessWide {
  // Set once, when a transport of this process was aborted. Its messages are still in flight, into
  // memory that is no longer valid, so MPI must not make progress for any other transport either.
  std::atomic<const std::string*> abort_reason{nullptr};
  std::function<void(const std::string&)> before_mpi_aborts;

  std::mutex mutex;                       // guards the members below
  std::vector<const MpiWaiter*> waiters;  // an abort of one ends what the others wait for
};

ProcessWide& process_wide() { return of_process<ProcessWide>(); }

void throw_if_aborted() {
  if (const std::string* why = process_wide().abort_reason) throw Aborted(*why);
}

}  // namespace

void before_mpi_aborts(std::function<void(const std::string&)> act) {
  process_wide().before_mpi_aborts = std::move(act);
}

void abort_for_mpi_error(int code, const char* call) {
  const std::string text = call;
  char error[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, error, &length) != MPI_SUCCESS) length = 0;
  const std::string why =
      text.substr(0, text.find('(')) +
      " failed: " + (length > 0 ? std::string(error, length) : "error " + std::to_string(code)) +
      ". The job is aborted, since messages may be lost. Look for what MPI, the "
      "network or another rank has reported before.";
  log(LogLevel::error, why);
  if (process_wide().before_mpi_aborts) process_wide().before_mpi_aborts(why);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
}

int rank_in(MPI_Comm communicator) {
  int rank = 0;
  HVD_MPI(MPI_Comm_rank(communicator, &rank));
  return rank;
}

int ranks_in(MPI_Comm communicator) {
  int ranks = 0;
  HVD_MPI(MPI_Comm_size(communicator, &ranks));
  return ranks;
}

void Messages::send(const void* data, int64_t bytes, int to, int tag) {
  for (int64_t start = 0; start < bytes; start += kPieceBytes) {
    HVD_MPI(MPI_Isend(static_cast<const char*>(data) + start,
                      static_cast<int>(std::min(kPieceBytes, bytes - start)), MPI_BYTE, to, tag,
                      communicator_, &requests_.emplace_back(MPI_REQUEST_NULL)));
  }
}

void Messages::receive(void* data, int64_t bytes, int from, int tag) {
  for (int64_t start = 0; start < bytes; start += kPieceBytes) {
    HVD_MPI(MPI_Irecv(static_cast<char*>(data) + start,
                      static_cast<int>(std::min(kPieceBytes, bytes - start)), MPI_BYTE, from, tag,
                      communicator_, &requests_.emplace_back(MPI_REQUEST_NULL)));
  }
}

bool Messages::all_complete() {
  int complete = 0;
  HVD_MPI(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                      MPI_STATUSES_IGNORE));
  if (complete) requests_.clear();
  return complete != 0;
}

bool done_briefly(int ranks, const std::function<bool()>& poll) {
  double end = 0;
  for (int polls = 1;; ++polls) {
    throw_if_aborted();
    if (poll()) return true;
    if (polls % kPollsPerYield != 0) continue;
    const double now = cpu_seconds();
    // For each step of a tree. std::log2 would need glibc 2.29.
    if (end == 0) end = now + kBriefSeconds * (1 + std::ilogb(ranks));
    if (now > end) return false;
    std::this_thread::yield();
  }
}

std::vector<int> others(int rank, int size) {
  std::vector<int> ranks;
  for (int i = 1; i < size; ++i) ranks.push_back((rank + i) % size);
  return ranks;
}

MpiWaiter::MpiWaiter(MPI_Comm communicator, const std::vector<int>& ranks, int few)
    : ranks_(ranks), many_(static_cast<int>(ranks.size()) > few), answers_(ranks.size()) {
  HVD_MPI(MPI_Comm_dup(communicator, &communicator_));
  rank_ = rank_in(communicator_);
  const int size = static_cast<int>(ranks.size());
  for (int away = 1; away < size && many_; away *= 2) {
    partners_.push_back((rank_ + away) % size);
    if (2 * away != size) partners_.push_back((rank_ + size - away) % size);
  }
  if (!many_) partners_ = others(rank_, size);
  told_.resize(partners_.size());
  std::lock_guard<std::mutex> lock(process_wide().mutex);
  process_wide().waiters.push_back(this);
}

MpiWaiter::~MpiWaiter() {
  {
    std::lock_guard<std::mutex> lock(process_wide().mutex);
    std::vector<const MpiWaiter*>& all = process_wide().waiters;
    all.erase(std::find(all.begin(), all.end(), this));
  }
  try {
    check_aborted();          // a message that is not received could match the next communicator's
  } catch (const Aborted&) {  // all ranks have left
  }
  for (std::list<Notice>* notices : {&sent_, &received_}) {
    for (Notice& notice : *notices) {
      std::vector<MPI_Request>& requests = notice.messages.requests_;
      HVD_MPI(MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE));
    }
  }
  HVD_MPI(MPI_Comm_free(&communicator_));
}

void MpiWaiter::next_step() {
  throw_if_aborted();
  ++step_;
  calls_.clear();
}

void MpiWaiter::wait(std::vector<MPI_Request>& requests, const Waiting& waiting) {
  const int count = static_cast<int>(requests.size());
  std::vector<int> indices(requests.size());
  Wait wait(*this, waiting);
  for (int left = count; left > 0;) {
    int completed = 0;
    HVD_MPI(MPI_Testsome(count, requests.data(), &completed, indices.data(), MPI_STATUSES_IGNORE));
    if (completed == MPI_UNDEFINED) return;
    left -= completed;
    wait.turn(completed > 0);
  }
}

MpiWaiter::Wait::Wait(MpiWaiter& waiter, const Waiting& waiting)
    : waiter_(waiter), waiting_(waiting) {
  throw_if_aborted();
}

void MpiWaiter::Wait::turn(bool something_has_come) {
  const auto now = Clock::now();
  if (Seconds(now - turned_).count() > kStoppedSeconds) start_ += now - turned_;
  turned_ = now;
  const double waited = something_has_come ? 0 : Seconds(now - start_).count();
  if (something_has_come) {
    start_ = now;
    next_call_ = kLongSeconds;
  } else if (waited < kSpinSeconds) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(Seconds(std::min(waited / 20, kMaxSleepSeconds)));
  }
  throw_if_aborted();  // after the sleep, in which another thread may have aborted
  if (waited < kSpinSeconds) return;
  if (waited > next_call_) {
    next_call_ = 2 * waited;
    waiter_.call_roll(waited);
  }
  waiter_.check_aborted();
  if (waited > kLongSeconds / 2) waiter_.pass_on();
  const std::string why = waiting_(waited, [this] { return waiter_.missing(); });
  if (!why.empty()) waiter_.abort(why);
}

void MpiWaiter::post(int tag, const std::string& bytes, const std::vector<int>& to,
                     std::list<Notice>* notices) const {
  Notice& notice = notices->emplace_back(Notice{Messages(communicator_), bytes});
  for (int r : to)
    notice.messages.send(notice.bytes.data(), static_cast<int64_t>(bytes.size()), r, tag);
}

void MpiWaiter::call_roll(double waited) {
  if (calls_.empty() || seconds_since(calls_.back().heard) > waited / 2) hear_call(call_ + 1);
}

void MpiWaiter::hear_call(uint64_t number) {
  if (number <= call_) return;
  call_ = number;
  calls_.push_back({number, Clock::now()});
  ++news_;
  next_ = 0;
}

void MpiWaiter::hear_answers(const Notice& notice) {
  Reader in(notice.bytes);
  uint64_t call = 0;
  std::vector<Answers> all;
  in(call, all);
  hear_call(call);
  // Who answers so late has kept the others waiting, and may do so until the next call.
  if (call == call_ && !calls_.empty() && seconds_since(calls_.back().heard) > kLateAnswerSeconds)
    return;
  bool news = false;
  for (const Answers& heard : all) {
    for (int r = heard.first; r < heard.end; ++r) {
      Answer& known = answers_[r];
      if (known.call > call) continue;
      news |= known.call < call && r != rank_;
      known = {call, std::max(known.step, heard.step)};
    }
  }
  if (many_ && news) ++news_;
}

// Answers, and passes on the others' answers.
void MpiWaiter::pass_on() {
  if (many_ && seconds_since(passed_on_) < kPassOnSeconds) return;
  for (size_t i = 0; i < partners_.size(); ++i) {
    const size_t k = (next_ + i) % partners_.size();
    if (told_[k] == news_) continue;
    answers_[rank_] = {call_, step_};
    std::vector<Answers> known;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      const Answer& answer = answers_[r];
      if (answer.call != call_ || (!many_ && r != rank_)) continue;
      if (known.empty() || known.back().end < r || known.back().step != answer.step)
        known.push_back({r, r, answer.step});
      ++known.back().end;
    }
    Writer out;
    out(call_, known);
    sent_.remove_if([](Notice& notice) { return notice.complete(); });
    post(kAnswers, out.take(), {partners_[k]}, &sent_);
    told_[k] = news_;
    if (!many_) continue;
    next_ = k + 1;
    passed_on_ = Clock::now();
    return;
  }
}

// Never waits for what a rank has begun to send: it may have ended since.
void MpiWaiter::check_aborted() {
  int arrived = 1;
  while (arrived) {
    MPI_Status status;
    HVD_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &arrived, &status));
    if (!arrived) break;
    int size = 0;
    HVD_MPI(MPI_Get_count(&status, MPI_BYTE, &size));
    Notice& notice = received_.emplace_back(Notice{Messages(communicator_)});
    notice.bytes.resize(size);
    notice.tag = status.MPI_TAG;
    notice.messages.receive(notice.bytes.data(), size, status.MPI_SOURCE, notice.tag);
  }
  received_.remove_if([this](Notice& notice) {
    if (!notice.complete()) return false;
    if (notice.tag == kAborted) abort(notice.bytes, this);  // the other sets may not have heard
    hear_answers(notice);
    return true;
  });
}

void MpiWaiter::abort(const std::string& why, const MpiWaiter* heard_by) {
  // For ever: they may not be sent in time.
  static auto* const all_notices = new std::list<std::list<Notice>>;
  std::list<Notice>* notices = nullptr;
  {
    std::lock_guard<std::mutex> lock(process_wide().mutex);
    throw_if_aborted();
    notices = &all_notices->emplace_back();
    for (const MpiWaiter* waiter : process_wide().waiters)
      if (waiter != heard_by)
        waiter->post(kAborted, why, others(waiter->rank_, static_cast<int>(waiter->ranks_.size())),
                     notices);
  }
  const auto start = Clock::now();
  for (Notice& notice : *notices) {
    do {
      throw_if_aborted();  // by another thread
    } while (!notice.complete() && seconds_since(start) < kSendReasonSeconds);
  }
  set_aborted(why);
}

void MpiWaiter::set_aborted(const std::string& why) {
  std::lock_guard<std::mutex> lock(process_wide().mutex);  // a thread may be posting notices
  throw_if_aborted();
  process_wide().abort_reason = new std::string(why);  // for ever
  throw Aborted(why);
}

// None, until they could answer.
std::vector<int> MpiWaiter::missing() {
  while (calls_.size() > 1 && seconds_since(calls_[1].heard) > kLateAnswerSeconds)
    calls_.pop_front();
  const double time = many_ ? 2 * kPassOnSeconds * static_cast<double>(partners_.size()) : 0;
  std::vector<int> missing, behind;
  if (calls_.empty() || seconds_since(calls_.front().heard) < time) return missing;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const Answer& answer = answers_[r];
    if (static_cast<int>(r) == rank_) continue;
    if (answer.call < calls_.front().number)
      missing.push_back(ranks_[r]);
    else if (answer.step < step_)
      behind.push_back(ranks_[r]);
  }
  // A rank that waits in an earlier step may wait for one of the missing, as this one does.
  return missing.empty() ? behind : missing;
}

}  // namespace hvd
