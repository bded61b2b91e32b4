// Control: the trace, the knobs and the faults, from the environment and from a test.
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "stub.h"

namespace dlo_stub {
namespace {

struct Fault {
  long skip, count;
  int code;
};
// Never destroyed: workers of streams outlive main().
struct State {
  std::mutex trace_mutex, fault_mutex;
  FILE* trace = nullptr;
  std::map<std::string, Fault> faults;
  std::atomic<bool> any_fault{false};
};

FILE* open_trace(const char* path) { return path && *path ? std::fopen(path, "a") : nullptr; }

State& state() {
  static State* made = [] {
    auto* fresh = new State;
    fresh->trace = open_trace(std::getenv("DLO_STUB_TRACE"));
    return fresh;
  }();
  return *made;
}

struct Setting {
  const char *name, *variable;
  long fallback;
};
constexpr Setting kSettings[] = {
    {"copy_us", "DLO_STUB_COPY_US", 0},
    {"op_us", "DLO_STUB_OP_US", 0},
    {"align", "DLO_STUB_ALIGN", 0},
    {"hccl_timeout_s", "DLO_STUB_HCCL_TIMEOUT_S", 60},
};
constexpr int kCount = static_cast<int>(Knob::count_);
static_assert(sizeof kSettings / sizeof *kSettings == kCount);

std::atomic<long>& cell(int which) {
  static std::atomic<long>* cells = [] {
    auto* made = new std::atomic<long>[kCount];
    for (int i = 0; i < kCount; ++i)
      made[i] = number_from_environment(kSettings[i].variable, kSettings[i].fallback);
    return made;
  }();
  return cells[which];
}

}  // namespace

const char* text_from_environment(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value && *value ? value : fallback;
}
long number_from_environment(const char* name, long fallback) {
  const char* value = std::getenv(name);
  return value && *value ? std::atol(value) : fallback;
}

void trace(const char* format, ...) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.trace_mutex);
  if (!s.trace) return;
  va_list args;
  va_start(args, format);
  std::vfprintf(s.trace, format, args);
  va_end(args);
  std::fputc('\n', s.trace);
  std::fflush(s.trace);
}

long knob(Knob which) { return cell(static_cast<int>(which)).load(); }

void pause_us(Knob which) {
  if (long us = knob(which)) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

int fault(const char* call) {
  State& s = state();
  if (!s.any_fault) return 0;
  std::lock_guard<std::mutex> lock(s.fault_mutex);
  auto found = s.faults.find(call);
  if (found == s.faults.end()) return 0;
  Fault& f = found->second;
  if (f.skip-- > 0) return 0;
  int code = f.code;
  if (--f.count == 0) s.faults.erase(found);
  trace("FAULT %s code=%d", call, code);
  return code;
}

}  // namespace dlo_stub

// Write the trace to `path` from now on; nullptr or "": to nowhere.
API void dlo_stub_trace(const char* path) {
  auto& s = dlo_stub::state();
  std::lock_guard<std::mutex> lock(s.trace_mutex);
  if (s.trace) std::fclose(s.trace);
  s.trace = dlo_stub::open_trace(path);
}

// Set a knob; return whether there is one of this name.
API int dlo_stub_set(const char* name, long value) {
  for (int i = 0; i < dlo_stub::kCount; ++i) {
    if (!std::strcmp(dlo_stub::kSettings[i].name, name)) {
      dlo_stub::cell(i) = value;
      return 1;
    }
  }
  return 0;
}

// Let `count` calls fail with `code`, after `skip` that do not. Count 0 takes the fault back.
API void dlo_stub_fail(const char* call, long skip, long count, int code) {
  auto& s = dlo_stub::state();
  std::lock_guard<std::mutex> lock(s.fault_mutex);
  s.faults.erase(call);
  if (count > 0) s.faults[call] = {skip, count, code};
  s.any_fault = !s.faults.empty();
}
