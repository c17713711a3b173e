// What is shown of a negotiation, or needed of one rank by others: texts, which the ranks combine
// pairwise like digests (agreement.h). The same text of many ranks is one text of a group of ranks,
// and only so many different ones travel.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/agreement.h"

namespace hvd {

// So many ranks are shown one by one; of more, so many groups, and ranges of ranks of a group.
constexpr size_t kShownRanks = 16;

// What ranks say of one matter.
struct Said {
  struct Group {
    void add(int first, int last);  // after those that it has
    template <typename Bytes>
    void fields(Bytes& bytes) {
      bytes(text, ranks, count);
    }

    std::string text;
    std::vector<std::pair<int, int>> ranks;  // of the job: first and last
    uint64_t count = 0;                      // also of those that are not among these
  };

  void add(const Said& other);
  template <typename Bytes>
  void fields(Bytes& bytes) {
    bytes(groups, count);
  }

  std::vector<Group> groups;  // in the order of their first ranks
  uint64_t count = 0;         // of ranks, also those whose text is not among these
};

// "ranks 0-7, 9 and 3 more".
std::string names(const Said::Group& group);

struct Texts {
  Texts() = default;
  // What a rank says to a decision.
  Texts(const Decision& decision, const Digest& all, const Report& mine);
  void add(const Texts& other);
  template <typename Bytes>
  void fields(Bytes& bytes) {
    bytes(matters);
  }

  std::vector<Said> matters;
};

// Completes the decision by what all ranks say.
void explain(const Digest& all, const Texts& texts, Decision* decision);

}  // namespace hvd
