// Libraries that are opened at run time, because most machines have none of them.
#pragma once

#include <string>
#include <vector>

namespace hvd {

class GpuLibrary {
 public:
  // The first that opens of: `chosen`, if not empty, and then nothing else; one of the names, if
  // the process has it already (TensorFlow opens what it uses); one in the folders that were set;
  // what the system finds. `variable` is what chose, for texts.
  GpuLibrary(const std::vector<std::string>& names, const std::string& chosen,
             const std::string& variable);

  // A function of any type, by CUDA's or HIP's name, or null; then notes that it is missing.
  struct Symbol {
    void* address;

    template <typename Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };
  Symbol operator[](const char* name);

  // The version, from this function of the library; an older one than `oldest` is a problem.
  int version(int (*ask)(int*), int oldest, std::string (*text)(int));

  // Why it cannot be used, in a sentence about `what`, and then the cure; empty if all that was
  // asked for is there.
  std::string problem(const std::string& what, const std::string& cure) const;

  std::string file() const;

 private:
  void* handle_ = nullptr;  // never closed: threads of the library may outlive us
  void* symbol_ = nullptr;  // one of its functions
  std::string problem_;
};

// Where to look for libraries beside what the system knows: those of Python's packages. Before any
// is opened.
void set_gpu_folders(const std::vector<std::string>& folders);

}  // namespace hvd
