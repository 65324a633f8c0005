// The Python module for soa_runner: Model, Call, run_many. A run releases the GIL and allocates no
// Python object. Memory is given as addresses; the Python code keeps its owners alive.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000  // one binary for Python 3.11 and all later versions
#include <Python.h>

#include <cstring>
#include <string>
#include <vector>

#include "common/counting.h"
#include "common/cpu_level.h"
#include "common/device_driver.h"
#include "include/soa_runner.h"
#include "common/threads.h"

namespace {

PyObject *runner_error = nullptr;
constexpr size_t kMessage = 1024;

// Sets an exception, and returns null.
PyObject *raise(const char *message) {
  PyErr_SetString(runner_error, message);
  return nullptr;
}

// What a method returns that gives nothing: None, or null with an exception.
PyObject *none_or_raise(int code, const char *message) {
  if (code != SOA_OK) return raise(message);
  Py_RETURN_NONE;
}

// The items of a sequence; `tuple` is null, with an exception set, if it is none.
struct Items {
  explicit Items(PyObject *sequence) : tuple(PySequence_Tuple(sequence)) {}
  Items(const Items &) = delete;
  Items &operator=(const Items &) = delete;
  ~Items() { Py_XDECREF(tuple); }

  size_t size() const { return static_cast<size_t>(PyTuple_Size(tuple)); }
  PyObject *operator[](size_t i) const { return PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i)); }

  PyObject *const tuple;
};

struct Model {
  PyObject_HEAD
  soa_model *model;
};

struct Call {
  PyObject_HEAD
  PyObject *owner;  // the Model
  soa_call *call;
};

PyTypeObject *call_type = nullptr;

// Reads a tuple (address, dtype, sizes). The tuple keeps owning the dtype string.
bool read_tensor(PyObject *item, soa_tensor *tensor) {
  unsigned long long address = 0;
  PyObject *sizes = nullptr;
  if (!PyArg_ParseTuple(item, "KsO!", &address, &tensor->dtype, &PyTuple_Type, &sizes)) return false;
  const Py_ssize_t ndim = PyTuple_Size(sizes);
  if (ndim < 1 || ndim > 2) {
    PyErr_SetString(PyExc_ValueError, "an argument has 1 or 2 sizes");
    return false;
  }
  tensor->data = reinterpret_cast<void *>(address);
  tensor->ndim = static_cast<int32_t>(ndim);
  for (Py_ssize_t i = 0; i < ndim; ++i) {
    tensor->sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    if (tensor->sizes[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

// Model(library, device, folder, instances, threads=1): opens an artifact, without the GIL.
PyObject *model_new(PyTypeObject *type, PyObject *arguments, PyObject *) {
  const char *library = nullptr, *device = nullptr, *folder = nullptr;
  int instances = 1, threads = 1;
  if (!PyArg_ParseTuple(arguments, "sszi|i", &library, &device, &folder, &instances, &threads)) return nullptr;
  char message[kMessage] = "";
  soa_model *opened = nullptr;
  int code = SOA_OK;
  Py_BEGIN_ALLOW_THREADS
  code = soa_model_open(library, device, folder, instances, threads, &opened, message, sizeof message);
  Py_END_ALLOW_THREADS
  if (code != SOA_OK) return raise(message);
  auto *self = reinterpret_cast<Model *>(PyType_GenericAlloc(type, 0));
  if (self == nullptr) {
    soa_model_close(opened);
    return nullptr;
  }
  self->model = opened;
  return reinterpret_cast<PyObject *>(self);
}

// Closes the model once; it waits for running calls without the GIL.
void close_model(Model *self) {
  soa_model *model = self->model;
  self->model = nullptr;
  Py_BEGIN_ALLOW_THREADS
  soa_model_close(model);
  Py_END_ALLOW_THREADS
}

PyObject *model_close(PyObject *self, PyObject *) {
  close_model(reinterpret_cast<Model *>(self));
  Py_RETURN_NONE;
}

void model_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  close_model(reinterpret_cast<Model *>(self));
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject *model_prepare(PyObject *self, PyObject *arguments) {
  auto *model = reinterpret_cast<Model *>(self);
  if (model->model == nullptr) return raise("the session is closed");
  const Items items(arguments);
  if (items.tuple == nullptr) return nullptr;
  std::vector<soa_tensor> tensors(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    if (!read_tensor(items[i], &tensors[i])) return nullptr;
  }
  char message[kMessage] = "";
  soa_call *created = nullptr;
  const int code = soa_call_create(model->model, tensors.data(), tensors.size(), &created, message,
                                   sizeof message);
  if (code != SOA_OK) return raise(message);
  auto *call = reinterpret_cast<Call *>(PyType_GenericAlloc(call_type, 0));
  if (call == nullptr) {
    soa_call_delete(created);
    return nullptr;
  }
  call->owner = Py_NewRef(self);
  call->call = created;
  return reinterpret_cast<PyObject *>(call);
}

// Reads the handle of a stream, which may be missing: then it is null. False with an exception.
bool read_stream(PyObject *const *arguments, Py_ssize_t count, void **stream) {
  *stream = nullptr;
  if (count == 0) return true;
  const unsigned long long handle = PyLong_AsUnsignedLongLong(arguments[0]);
  if (handle == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return false;
  *stream = reinterpret_cast<void *>(handle);
  return true;
}

PyObject *call_run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
  void *stream = nullptr;
  if (!read_stream(arguments, count, &stream)) return nullptr;
  char message[kMessage];
  int code = SOA_OK;
  soa_call *call = reinterpret_cast<Call *>(self)->call;
  Py_BEGIN_ALLOW_THREADS
  code = soa_call_run(call, stream, message, sizeof message);
  Py_END_ALLOW_THREADS
  return none_or_raise(code, message);
}

// Takes [(index, (address, dtype, sizes)), ...]. If it fails, no argument is changed.
PyObject *call_update(PyObject *self, PyObject *changes) {
  const Items items(changes);
  if (items.tuple == nullptr) return nullptr;
  std::vector<soa_tensor> tensors(items.size());
  std::vector<size_t> indices(items.size());
  for (size_t k = 0; k < items.size(); ++k) {
    PyObject *described = nullptr;
    Py_ssize_t index = 0;
    if (!PyArg_ParseTuple(items[k], "nO!", &index, &PyTuple_Type, &described)) return nullptr;
    if (!read_tensor(described, &tensors[k])) return nullptr;
    indices[k] = static_cast<size_t>(index);
  }
  char message[kMessage] = "";
  soa_call *call = reinterpret_cast<Call *>(self)->call;
  return none_or_raise(soa_call_update(call, indices.data(), tensors.data(), items.size(), message, sizeof message), message);
}

PyObject *call_tile(PyObject *self, PyObject *arguments) {
  const char *kinds = nullptr;
  long long rows = 0;
  int threads = 1;
  if (!PyArg_ParseTuple(arguments, "sLi", &kinds, &rows, &threads)) return nullptr;
  char message[kMessage] = "";
  soa_call *call = reinterpret_cast<Call *>(self)->call;
  return none_or_raise(soa_call_tile(call, kinds, rows, threads, message, sizeof message), message);
}

void call_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  auto *call = reinterpret_cast<Call *>(self);
  soa_call_delete(call->call);
  Py_XDECREF(call->owner);
  PyObject_Free(self);
  Py_DECREF(type);
}

// See the runner's run_many in Python. The items of the list are calls, or None.
PyObject *run_many(PyObject *, PyObject *arguments) {
  PyObject *list = nullptr;
  int threads = 1;
  unsigned long long stream = 0;
  if (!PyArg_ParseTuple(arguments, "Oi|K", &list, &threads, &stream)) return nullptr;
  const Items items(list);
  if (items.tuple == nullptr) return nullptr;
  std::vector<soa_call *> calls;
  std::vector<size_t> numbers;  // of the calls in the list, which has None for one that does nothing
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i] == Py_None) continue;
    if (Py_TYPE(items[i]) != call_type) {
      PyErr_SetString(PyExc_TypeError, "run_many takes Call objects");
      return nullptr;
    }
    calls.push_back(reinterpret_cast<Call *>(items[i])->call);
    numbers.push_back(i);
  }
  char message[kMessage] = "";
  size_t failed = calls.size();
  int code = SOA_OK;
  Py_BEGIN_ALLOW_THREADS
  code = soa_run_many(calls.data(), calls.size(), threads, reinterpret_cast<void *>(stream), &failed,
                      message, sizeof message);
  Py_END_ALLOW_THREADS
  if (code == SOA_OK || failed == calls.size()) return none_or_raise(code, message);
  // The message is "call 3: ...", with the number among the calls that were run.
  return raise(("call " + std::to_string(numbers[failed]) + std::strchr(message, ':')).c_str());
}

PyMethodDef model_methods[] = {
    {"prepare", model_prepare, METH_O,
     "prepare([(address, dtype, sizes), ...]) -> Call over that memory, which the caller keeps alive."},
    {"close", model_close, METH_NOARGS, "Close; running calls end first, later ones are refused."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef call_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(call_run)), METH_FASTCALL,
     "run([stream]): run once, without the GIL."},
    {"tile", call_tile, METH_VARARGS,
     "tile(kinds, rows, threads): from now on run on so many rows at a time, see soa_runner.h."},
    {"update", call_update, METH_O,
     "update([(index, (address, dtype, sizes)), ...]): replace arguments, all of them or none."},
    {nullptr, nullptr, 0, nullptr}};

PyObject *set_error(PyObject *, PyObject *error_class) {
  if (!PyExceptionClass_Check(error_class)) {
    PyErr_SetString(PyExc_TypeError, "set_error takes an exception class");
    return nullptr;
  }
  PyObject *before = runner_error;
  runner_error = Py_NewRef(error_class);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

// The architectures of NVIDIA's devices, in their order. AMD's driver has the same number for gfx908 and gfx90a.
PyObject *gpus(PyObject *, PyObject *) {
  std::vector<int> architectures;
  std::string error_text;
  Py_BEGIN_ALLOW_THREADS
  try {
    const soa_runner::Driver &driver = soa_runner::Driver::of("cuda");
    const int count = driver.devices();
    for (int number = 0; number < count; ++number) {
      architectures.push_back(driver.architecture(driver.device(number)));
    }
  } catch (const soa::Error &error) {
    error_text = error.message();
  }
  Py_END_ALLOW_THREADS
  if (!error_text.empty()) return raise(error_text.c_str());
  PyObject *list = PyList_New(0);
  for (size_t i = 0; list != nullptr && i < architectures.size(); ++i) {
    PyObject *number = PyLong_FromLong(architectures[i]);
    if (number == nullptr || PyList_Append(list, number) != 0) Py_CLEAR(list);
    Py_XDECREF(number);
  }
  return list;
}

PyObject *missing_cpu_features(PyObject *, PyObject *arguments) {
  const char *arch = nullptr;
  if (!PyArg_ParseTuple(arguments, "s", &arch)) return nullptr;
  return PyUnicode_FromString(soa_cpu::missing_here(arch).c_str());
}

PyObject *openmp_unused(PyObject *, PyObject *) {
  soa_runner::came_through_fork = false;
  Py_RETURN_NONE;
}

PyObject *count_between(PyObject *, PyObject *arguments) {
  unsigned long long memory = 0, edges = 0, counts = 0;
  const char *dtype = nullptr;
  long long n = 0;
  int most = 0;
  if (!PyArg_ParseTuple(arguments, "KsLKiK", &memory, &dtype, &n, &edges, &most, &counts)) return nullptr;
  bool known = false;
  Py_BEGIN_ALLOW_THREADS
  known = soa_runner::count_between(dtype, reinterpret_cast<const void *>(memory), n,
                                    reinterpret_cast<const double *>(edges), most,
                                    reinterpret_cast<int64_t *>(counts));
  Py_END_ALLOW_THREADS
  if (!known) {
    PyErr_Format(PyExc_ValueError, "%s has no numbers that are counted", dtype);
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"count_between", count_between, METH_VARARGS,
     "count_between(address, dtype, n, edges, number of edges, counts): see common/counting.h."},
    {"gpus", gpus, METH_NOARGS, "gpus() -> the architecture of each NVIDIA GPU that the driver sees, as 90 of sm_90."},
    {"missing_cpu_features", missing_cpu_features, METH_VARARGS,
     "missing_cpu_features(arch) -> the features that code for it needs and this processor lacks."},
    {"openmp_unused", openmp_unused, METH_NOARGS, "openmp_unused(): as engines.processes.forks.allow_openmp."},
    {"set_error", set_error, METH_O, "set_error(class): raise this for whatever the runner refuses."},
    {"run_many", run_many, METH_VARARGS,
     "run_many(calls, threads[, stream]): run all, on that many threads, without the GIL."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot model_slots[] = {{Py_tp_new, reinterpret_cast<void *>(model_new)},
                             {Py_tp_dealloc, reinterpret_cast<void *>(model_dealloc)},
                             {Py_tp_methods, model_methods},
                             {0, nullptr}};
PyType_Spec model_spec = {"engines.native._native.Model", sizeof(Model), 0, Py_TPFLAGS_DEFAULT, model_slots};

PyType_Slot call_slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(call_dealloc)},
                            {Py_tp_methods, call_methods},
                            {0, nullptr}};
PyType_Spec call_spec = {"engines.native._native.Call", sizeof(Call), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "engines.native._native",
                          "The native runner: see engines/native/include/soa_runner.h.", -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  PyObject *module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyObject *model_type = PyType_FromSpec(&model_spec);
  call_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&call_spec));
  runner_error = Py_NewRef(PyExc_RuntimeError);  // until set_error is called
  if (model_type == nullptr || call_type == nullptr ||
      PyModule_AddObjectRef(module, "Model", model_type) < 0 ||
      PyModule_AddObjectRef(module, "Call", reinterpret_cast<PyObject *>(call_type)) < 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
