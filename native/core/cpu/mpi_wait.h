// Messages and errors of MPI, and waits for other ranks, with a deadline and back-off, which find
// out who is missing.
//
// An error of MPI ends the job: mpi4py makes MPI return errors where it would otherwise end the
// process, and after one no buffer can be relied on.
//
// The ranks of a set make the same sequence of steps. A rank that waits in a step for more than 1,
// 2, 4, … seconds calls the roll, unless another one has just done so. Each rank that has waited
// for half a second answers with its step; who does not is missing. Few ranks tell each other of
// themselves. Each of many tells the ranks 1, 2, 4, … after it all answers that it knows, one at a
// time, for as long as it hears of new ones: about 2 log2 N messages of each rank, whose size does
// not depend on N, but on how many gaps the missing ranks make.
//
// A rank that aborts sends its reason to the others, which abort with the same text.
#pragma once

#include <mpi.h>

#include <deque>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "core/base/clock.h"
#include "core/request/transport.h"

namespace hvd {

// What to do with the text of an error before the job is aborted. Once, at init.
void before_mpi_aborts(std::function<void(const std::string& why)> act);

[[noreturn]] void abort_for_mpi_error(int code, const char* call);

// Around each call.
#define HVD_MPI(...)                                       \
  do {                                                     \
    if (const int code = __VA_ARGS__; code != MPI_SUCCESS) \
      abort_for_mpi_error(code, #__VA_ARGS__);             \
  } while (false)

// Of a communicator: this process's rank, and how many there are.
int rank_in(MPI_Comm communicator);
int ranks_in(MPI_Comm communicator);

// Messages of any size between this rank of a communicator and others; all are under way at once.
class Messages {
 public:
  // Larger ones are split: MPI counts are ints, and each piece that arrives is progress, which
  // restarts the deadline.
  static constexpr int64_t kPieceBytes = 64 << 20;

  explicit Messages(MPI_Comm communicator) : communicator_(communicator) {}

  // Both sides know how long a message is, so that empty ones need none.
  void send(const void* data, int64_t bytes, int to, int tag = 0);
  void receive(void* data, int64_t bytes, int from, int tag = 0);

  // Lets MPI make progress, without waiting.
  bool all_complete();

 private:
  friend class MpiWaiter;

  const MPI_Comm communicator_;
  std::vector<MPI_Request> requests_;
};

// Polls for some latencies of a network, for an exchange of so many ranks. False: it is not done.
// Throws Aborted.
bool done_briefly(int ranks, const std::function<bool()>& poll);

// The other ones of some ranks. Each starts with a different one, so that none receives from all at
// once.
std::vector<int> others(int rank, int size);

class MpiWaiter {
 public:
  // One wait in the current step. The caller polls for completion and calls turn() after each poll.
  // Throws Aborted if a transport of this process was aborted: MPI must not be called any more.
  class Wait {
   public:
    Wait(MpiWaiter& waiter, const Waiting& waiting);

    // Sleeps if there was no progress, longer each time, and checks. Throws Aborted.
    void turn(bool something_has_come);

   private:
    MpiWaiter& waiter_;
    const Waiting& waiting_;
    Clock::time_point start_ = Clock::now(), turned_ = start_;
    double next_call_ = kLongSeconds;  // after so long without progress
  };

  // Duplicates the communicator. `ranks` last longer. Up to `few` tell each other of themselves.
  MpiWaiter(MPI_Comm communicator, const std::vector<int>& ranks, int few);
  ~MpiWaiter();

  // Throws Aborted if a transport of this process was aborted.
  void next_step();

  // Until all requests are complete. Throws Aborted.
  void wait(std::vector<MPI_Request>& requests, const Waiting& waiting);
  void wait(Messages& messages, const Waiting& waiting) { wait(messages.requests_, waiting); }

  // Receives the notices that have arrived. Throws Aborted if a rank has aborted.
  void check_aborted();

  // Aborts the waits of all ranks, also those of this process's other sets, but for the one that
  // has heard of it. Throws Aborted.
  [[noreturn]] void abort(const std::string& why, const MpiWaiter* heard_by = nullptr);

 private:
  struct Notice {
    Messages messages;
    std::string bytes = {};
    int tag = 0;  // of one that is received

    bool complete() { return messages.all_complete(); }
  };
  struct Answer {
    uint64_t call = 0, step = 0;
  };
  // Ranks with one answer.
  struct Answers {
    int first, end;
    uint64_t step;

    template <typename Bytes>
    void fields(Bytes& bytes) {
      bytes(first, end, step);
    }
  };
  struct Call {
    uint64_t number;
    Clock::time_point heard;
  };

  void post(int tag, const std::string& bytes, const std::vector<int>& to,
            std::list<Notice>* notices) const;
  void call_roll(double waited);
  void hear_call(uint64_t number);
  void hear_answers(const Notice& notice);
  void pass_on();
  [[noreturn]] static void set_aborted(const std::string& why);
  std::vector<int> missing();

  // Ranks that wait for longer than this call the roll.
  static constexpr double kLongSeconds = 1.0;

  MPI_Comm communicator_;
  const std::vector<int>& ranks_;
  const bool many_;
  int rank_;
  uint64_t step_ = 0;
  uint64_t call_ = 0;            // the newest
  std::deque<Call> calls_;       // heard in this step; not those before one that all could answer
  std::vector<Answer> answers_;  // by rank, the last one
  uint64_t news_ = 0;            // how often there were some for
  std::vector<int> partners_;    // those whom this rank tells
  std::vector<uint64_t> told_;   // by partner: news_ then
  size_t next_ = 0;              // partner
  Clock::time_point passed_on_;
  std::list<Notice> sent_, received_;
};

}  // namespace hvd
