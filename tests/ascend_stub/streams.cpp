// Streams: each a queue with a worker thread of its own, so that a missing wait gives wrong numbers;
// and the events that order them.
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "stub.h"

using namespace dlo_stub;

namespace {

struct Stream {
  Stream(int id_, int device_) : id(id_), device(device_) {}
  const int id, device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false, started = false;
  int error = kOk;  // the first one; it stays

  void submit(Work work) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    if (!started) {  // torch_npu makes pools of 32 streams: a thread only for those in use
      started = true;
      std::thread([this] { run(); }).detach();
    }
    changed.notify_all();
  }
  void run() {
    set_current_device(device);
    for (;;) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !queue.empty(); });
        work = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      int code = work();
      work = nullptr;
      std::lock_guard<std::mutex> lock(mutex);
      if (code && !error) error = code;
      busy = false;
      changed.notify_all();
    }
  }
  int sync() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return queue.empty() && !busy; });
    return error;
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return queue.empty() && !busy;
  }
  int error_now() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }
};

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}
// One recording of an event. A wait means the recording of its time, whatever comes after.
struct Recording {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double stamp_ms = 0;
  int error = kOk;  // of the stream when it came to the recording

  void reach(int error_) {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    stamp_ms = now_ms();
    error = error_;
    changed.notify_all();
  }
  int wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done; });
    return error;
  }
  bool query() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
  double stamp() {
    std::lock_guard<std::mutex> lock(mutex);
    return stamp_ms;
  }
};
struct Event {
  int id;
  std::mutex mutex;
  std::shared_ptr<Recording> latest;  // null: never recorded

  std::shared_ptr<Recording> now() {
    std::lock_guard<std::mutex> lock(mutex);
    return latest;
  }
};

// Never destroyed: a worker may still look at a stream.
struct State {
  std::mutex mutex;
  std::deque<Stream*> streams;
  std::map<int, Stream*> defaults;
  int next_event = 0;
};
State& state() {
  static State* made = new State;
  return *made;
}

Stream* new_stream(int device) {  // with the mutex held
  State& s = state();
  auto* made = new Stream(static_cast<int>(s.streams.size()), device);
  s.streams.push_back(made);
  return made;
}
Stream* as_stream(void* stream) {
  if (stream) return static_cast<Stream*>(stream);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto& found = s.defaults[device_or_first()];
  if (!found) found = new_stream(device_or_first());
  return found;
}

}  // namespace

void dlo_stub::submit(void* stream, Work work) { as_stream(stream)->submit(std::move(work)); }
int dlo_stub::stream_id(void* stream) { return as_stream(stream)->id; }
int dlo_stub::sync_stream(void* stream) { return as_stream(stream)->sync(); }
bool dlo_stub::stream_idle(void* stream) { return as_stream(stream)->idle(); }
int dlo_stub::sync_device(int device) {
  std::deque<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    all = state().streams;
  }
  int error = kOk;
  for (auto* stream : all)
    if (stream->device == device)
      if (int code = stream->sync(); code && !error) error = code;
  return error;
}

// ---------------------------------------------------------------- streams
API int aclrtCreateStreamWithConfig(void** out, uint32_t priority, uint32_t) {
  Stream* made;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    made = new_stream(device_or_first());
  }
  trace("CreateStream stream=%d dev=%d prio=%u", made->id, made->device, priority);
  *out = made;
  return kOk;
}
API int aclrtCreateStream(void** out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
API int aclrtDestroyStream(void* stream) {
  as_stream(stream)->sync();
  return kOk;
}
API int aclrtDestroyStreamForce(void*) { return kOk; }
API int aclrtSynchronizeStream(void* stream) {
  trace("SyncStream stream=%d", stream_id(stream));
  return sync_stream(stream);
}
API int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  return aclrtSynchronizeStream(stream);
}
API int aclrtSynchronizeDevice() {
  trace("SyncDevice dev=%d", current_device());
  return sync_device(device_or_first());
}
API int aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }
API int aclrtStreamQuery(void* stream, int* status) {
  *status = stream_idle(stream) ? 0 : 1;
  return kOk;
}
API int aclrtStreamGetId(void* stream, int32_t* id) {
  *id = stream_id(stream);
  return kOk;
}

// ---------------------------------------------------------------- events
API int aclrtCreateEventExWithFlag(void** out, uint32_t flags) {
  auto* made = new Event;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    made->id = state().next_event++;
  }
  trace("CreateEvent event=%d flags=%#x", made->id, flags);
  *out = made;
  return kOk;
}
API int aclrtCreateEventWithFlag(void** out, uint32_t flags) {
  return aclrtCreateEventExWithFlag(out, flags);
}
API int aclrtDestroyEvent(void* event) {
  delete static_cast<Event*>(event);
  return kOk;
}
API int aclrtRecordEvent(void* event, void* stream) {
  auto* e = static_cast<Event*>(event);
  auto* s = as_stream(stream);
  auto made = std::make_shared<Recording>();
  {
    std::lock_guard<std::mutex> lock(e->mutex);
    e->latest = made;
  }
  trace("RecordEvent event=%d stream=%d", e->id, s->id);
  s->submit([made, s] {
    made->reach(s->error_now());
    return kOk;
  });
  return kOk;
}
API int aclrtStreamWaitEvent(void* stream, void* event) {
  auto* e = static_cast<Event*>(event);
  auto* s = as_stream(stream);
  trace("StreamWaitEvent stream=%d event=%d", s->id, e->id);
  // What failed there is handed on: a wait for it must not look like success.
  if (auto found = e->now()) s->submit([found] { return found->wait(); });
  return kOk;
}
API int aclrtStreamWaitEventWithTimeout(void* stream, void* event, int32_t) {
  return aclrtStreamWaitEvent(stream, event);
}
API int aclrtResetEvent(void*, void*) { return kOk; }
API int aclrtSynchronizeEvent(void* event) {
  auto* e = static_cast<Event*>(event);
  trace("SyncEvent event=%d", e->id);
  auto found = e->now();
  return found ? found->wait() : kOk;
}
API int aclrtQueryEventStatus(void* event, int* status) {
  auto found = static_cast<Event*>(event)->now();
  *status = !found || found->query() ? 1 : 0;
  return kOk;
}
API int aclrtQueryEventWaitStatus(void*, int* status) {
  *status = 0;
  return kOk;
}
API int aclrtEventElapsedTime(float* ms, void* first, void* second) {
  auto a = static_cast<Event*>(first)->now(), b = static_cast<Event*>(second)->now();
  if (!a || !b || !a->query() || !b->query()) return kInvalidParam;
  *ms = static_cast<float>(b->stamp() - a->stamp());
  return kOk;
}
API int aclrtEventGetTimestamp(void* event, uint64_t* us) {
  auto found = static_cast<Event*>(event)->now();
  if (!found) return kInvalidParam;
  *us = static_cast<uint64_t>(found->stamp() * 1000);
  return kOk;
}

// ---------------------------------------------------------------- calls of the host
API int aclrtLaunchCallback(void (*fn)(void*), void* arg, int, void* stream) {
  trace("LaunchCallback stream=%d", stream_id(stream));
  submit(stream, [=] {
    fn(arg);
    return kOk;
  });
  return kOk;
}
API int aclrtLaunchHostFunc(void* stream, void (*fn)(void*), void* arg) {
  return aclrtLaunchCallback(fn, arg, 0, stream);
}
API int aclrtSubscribeReport(uint64_t, void*) { return kOk; }
API int aclrtUnSubscribeReport(uint64_t, void*) { return kOk; }
API int aclrtProcessReport(int32_t) { return kOk; }
