// What the libraries of the stand-in share: streams, faults, knobs and the trace.
//
// All declarations here and in the .cpp files are our own: only names and the C ABI matter to the
// loader. No header of CANN is copied or included.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>

#define API extern "C" __attribute__((visibility("default")))
#define SHARED __attribute__((visibility("default")))

namespace dlo_stub {

// Return codes of the runtime, as CANN numbers them.
constexpr int kOk = 0;
constexpr int kInvalidParam = 107000;
constexpr int kContextNull = 107002;
constexpr int kNotSupported = 207000;
constexpr int kOutOfMemory = 207001;

// Work of a stream: 0, or the code of what went wrong with it.
using Work = std::function<int()>;

// Append work to a stream (nullptr: the default stream of the current device).
SHARED void submit(void* stream, Work work);
SHARED int stream_id(void* stream);
// Block until all work of a stream or of a device is done; return the first error of it.
int sync_stream(void* stream);
int sync_device(int device);
bool stream_idle(void* stream);

int device_count();
int current_device();  // -1: none yet
void set_current_device(int device);
inline int device_or_first() { return current_device() < 0 ? 0 : current_device(); }

// "device", "pinned", "registered" or "pageable".
const char* kind_of(const void* p, size_t n);
void memory_info(int device, size_t* free_bytes, size_t* total_bytes);

// One line of the trace, if there is one.
SHARED void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));
// Settings: DLO_STUB_<NAME> of the environment until dlo_stub_set(name) was called.
enum class Knob { copy_us, op_us, align, hccl_timeout_s, count_ };
SHARED long knob(Knob which);
// Pause as long as a knob says.
SHARED void pause_us(Knob which);
// The code with which this call is to fail now, or 0.
SHARED int fault(const char* call);
SHARED const char* text_from_environment(const char* name, const char* fallback);
SHARED long number_from_environment(const char* name, long fallback);

}  // namespace dlo_stub
