#include "core/cpu/mpi_wait.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "core/base/log.h"

namespace hvd {
namespace {

// Back-off: a rank that is as fast as the others never sleeps; one that waits for long uses hardly
// any CPU, and oversleeps by a small fraction of its wait.
constexpr double kSpinSeconds = 200e-6;
constexpr double kMaxSleepSeconds = 1e-3;

// Ranks that wait for longer than this notify the others.
constexpr double kLongSeconds = 1.0;

// How long a rank that aborts lets MPI send the reason.
constexpr double kSendReasonSeconds = 0.1;

constexpr int kWaits = 1;    // the step's number
constexpr int kAborted = 2;  // the reason

// Set once, when a transport of this process was aborted. Its messages are still in flight, into
// memory that is no longer valid, so MPI must not make progress for any other transport either.
std::atomic<const std::string*> abort_reason{nullptr};

// Of this process. An abort of one ends what the others wait for.
struct Waiters {
  std::mutex mutex;
  std::set<const MpiWaiter*> all;
};

Waiters& waiters() {
  static auto* waiters = new Waiters;
  return *waiters;
}

// Never destroyed: engines' threads may outlive main().
std::function<void(const std::string&)>* act_before = nullptr;

}  // namespace

void before_mpi_aborts(std::function<void(const std::string&)> act) {
  act_before = new std::function<void(const std::string&)>(std::move(act));
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
  if (act_before) (*act_before)(why);
  MPI_Abort(MPI_COMM_WORLD, 1);
  _exit(1);
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

std::vector<int> others(int rank, int size) {
  std::vector<int> ranks;
  for (int i = 1; i < size; ++i) ranks.push_back((rank + i) % size);
  return ranks;
}

MpiWaiter::MpiWaiter(MPI_Comm communicator, const std::vector<int>& ranks)
    : ranks_(ranks), waits_in_(ranks.size(), 0) {
  HVD_MPI(MPI_Comm_dup(communicator, &communicator_));
  HVD_MPI(MPI_Comm_rank(communicator_, &rank_));
  std::lock_guard<std::mutex> lock(waiters().mutex);
  waiters().all.insert(this);
}

MpiWaiter::~MpiWaiter() {
  {
    std::lock_guard<std::mutex> lock(waiters().mutex);
    waiters().all.erase(this);
  }
  try {
    check_aborted();          // a message that is not received could match the next communicator's
  } catch (const Aborted&) {  // all ranks have left
  }
  for (Notice& notice : sent_) {
    HVD_MPI(MPI_Waitall(static_cast<int>(notice.requests.size()), notice.requests.data(),
                        MPI_STATUSES_IGNORE));
  }
  HVD_MPI(MPI_Comm_free(&communicator_));
}

void MpiWaiter::wait(std::vector<MPI_Request>& requests, const Waiting& waiting) {
  const int count = static_cast<int>(requests.size());
  std::vector<int> indices(requests.size());
  Wait wait(*this, waiting);
  wait.check();
  for (int left = count; left > 0;) {
    int completed = 0;
    HVD_MPI(MPI_Testsome(count, requests.data(), &completed, indices.data(), MPI_STATUSES_IGNORE));
    if (completed == MPI_UNDEFINED) return;
    left -= completed;
    wait.turn(completed > 0);
  }
}

void MpiWaiter::Wait::check() const {
  if (const std::string* why = abort_reason) throw Aborted(*why);
}

void MpiWaiter::Wait::turn(bool something_has_come) {
  check();
  if (something_has_come) {
    start_ = Clock::now();
    return;
  }
  const double waited = seconds_since(start_);
  if (waited < kSpinSeconds) return std::this_thread::yield();
  std::this_thread::sleep_for(Seconds(std::min(waited / 20, kMaxSleepSeconds)));
  if (waited > kLongSeconds && !told_) {
    told_ = true;
    const uint64_t step = waiter_.step_;
    waiter_.notify(kWaits, std::string(reinterpret_cast<const char*>(&step), sizeof step));
  }
  waiter_.check_aborted();
  const std::string why = waiting_(waited, told_ ? waiter_.missing() : std::vector<int>{});
  if (!why.empty()) waiter_.abort(why);
}

void MpiWaiter::notify(int tag, const std::string& bytes) {
  sent_.remove_if([](Notice& notice) {
    int done = 0;
    HVD_MPI(MPI_Testall(static_cast<int>(notice.requests.size()), notice.requests.data(), &done,
                        MPI_STATUSES_IGNORE));
    return done != 0;
  });
  post(tag, bytes, &sent_.emplace_back());
}

void MpiWaiter::post(int tag, const std::string& bytes, Notice* to) const {
  Notice& notice = *to;
  notice.bytes = bytes;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (static_cast<int>(r) == rank_) continue;
    notice.requests.push_back(MPI_REQUEST_NULL);
    HVD_MPI(MPI_Isend(notice.bytes.data(), static_cast<int>(notice.bytes.size()), MPI_BYTE,
                      static_cast<int>(r), tag, communicator_, &notice.requests.back()));
  }
}

void MpiWaiter::check_aborted() {
  while (true) {
    int arrived = 0;
    MPI_Status status;
    HVD_MPI(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, communicator_, &arrived, &status));
    if (!arrived) return;
    int size = 0;
    HVD_MPI(MPI_Get_count(&status, MPI_BYTE, &size));
    std::string bytes(size, '\0');
    HVD_MPI(MPI_Recv(bytes.data(), size, MPI_BYTE, status.MPI_SOURCE, status.MPI_TAG, communicator_,
                     MPI_STATUS_IGNORE));
    if (status.MPI_TAG == kAborted) set_aborted(bytes);
    std::memcpy(&waits_in_[status.MPI_SOURCE], bytes.data(), sizeof step_);
  }
}

void MpiWaiter::abort(const std::string& why) {
  if (const std::string* before = abort_reason) throw Aborted(*before);
  // For ever: they may not be sent in time.
  static auto* const all_notices = new std::list<std::list<Notice>>;
  std::list<Notice>* notices = nullptr;
  {
    std::lock_guard<std::mutex> lock(waiters().mutex);
    notices = &all_notices->emplace_back();
    for (const MpiWaiter* waiter : waiters().all)
      waiter->post(kAborted, why, &notices->emplace_back());
  }
  const auto start = Clock::now();
  for (Notice& notice : *notices) {
    int done = 0;
    while (!done && seconds_since(start) < kSendReasonSeconds) {
      HVD_MPI(MPI_Testall(static_cast<int>(notice.requests.size()), notice.requests.data(), &done,
                          MPI_STATUSES_IGNORE));
    }
  }
  set_aborted(why);
}

void MpiWaiter::set_aborted(const std::string& why) {
  abort_reason = new std::string(why);  // for ever
  throw Aborted(why);
}

std::vector<int> MpiWaiter::missing() const {
  std::vector<int> missing;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (static_cast<int>(r) != rank_ && waits_in_[r] < step_) missing.push_back(ranks_[r]);
  }
  return missing;
}

}  // namespace hvd
