/* Launches of compiled kernels: all that is known beforehand is laid out once, a call fills in pointers and numbers.

   Python's numbers and tensors come in, one call of the CUDA driver goes out.  libcuda is opened by name when the first
   kernel is loaded, so that this compiles without CUDA. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 16, PLAIN_SHARED = 48 << 10, INVALID_CONTEXT = 201, COOPERATIVE = 2 };
enum { MAX_THREADS_PER_BLOCK = 0, STATIC_SHARED = 1, MAX_DYNAMIC_SHARED = 8 }; /* of a function */
enum { MULTIPROCESSORS = 16, MAX_SHARED_OF_BLOCK = 97 };                       /* of a device */
enum { PREFER_SHARED = 1 };

typedef struct { int id; char pad[4]; union { char bytes[64]; int integer; } value; } Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;

static struct {
    int (*cuGetErrorString)(int, const char **);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxSetCurrent)(void *);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuFuncGetAttribute)(int *, int, void *);
    int (*cuFuncSetAttribute)(void *, int, int);
    int (*cuFuncSetCacheConfig)(void *, int);
    int (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *, void *, int, size_t);
    int (*cuLaunchKernelEx)(const Config *, void *, void **, void **);
} cuda;

typedef struct {
    void *function;
    Config config;
    Attribute cooperative;
    int device;
    Py_ssize_t pointers, numbers, slots;
    char *types;       /* of the numbers that a call hands over: i int32, q int64, d float64 */
    uint64_t *fixed;   /* the slots behind them */
    PyObject *otherwise, *failed;
} Launch;

static PyObject *data_ptr;

static const char *message_of(int status) {
    const char *text = NULL;
    cuda.cuGetErrorString(status, &text);
    return text ? text : "unknown error";
}

static PyObject *raise(int status) {
    return PyErr_Format(PyExc_RuntimeError, "%s (CUDA driver error %d)", message_of(status), status);
}

/* A thread that has not used the device yet has no context. */
static int enter(int device) {
    void *context = NULL;
    int status = cuda.cuCtxGetCurrent(&context);
    if (status || context) return status;
    status = cuda.cuDevicePrimaryCtxRetain(&context, device);
    return status ? status : cuda.cuCtxSetCurrent(context);
}

static PyObject *connect(PyObject *module, PyObject *library) {
    const char *name = PyUnicode_AsUTF8(library);
    void *handle = name ? dlopen(name, RTLD_NOW) : NULL;
    if (!name) return NULL;
    if (!handle) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define TAKE(function)                                                                                       \
    if (!(*(void **)&cuda.function = dlsym(handle, #function)))                                              \
        return PyErr_Format(PyExc_OSError, "%s has no " #function, name);
    TAKE(cuGetErrorString) TAKE(cuCtxGetCurrent) TAKE(cuCtxSetCurrent) TAKE(cuDevicePrimaryCtxRetain)
    TAKE(cuDeviceGetAttribute) TAKE(cuModuleLoadData) TAKE(cuModuleGetFunction) TAKE(cuFuncGetAttribute)
    TAKE(cuFuncSetAttribute) TAKE(cuFuncSetCacheConfig) TAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
    TAKE(cuLaunchKernelEx)
#undef TAKE
    Py_RETURN_NONE;
}

/* Everything that can be refused is refused here, before anything runs. */
static int prepare(void *function, int device, int threads, int shared) {
    int status, most = 0, taken = 0, limit = 0;
    if ((status = cuda.cuFuncGetAttribute(&limit, MAX_THREADS_PER_BLOCK, function))) return status;
    if (threads > limit) return 701; /* out of resources */
    if (shared <= PLAIN_SHARED) return 0;
    if ((status = cuda.cuFuncSetCacheConfig(function, PREFER_SHARED))) return status;
    if ((status = cuda.cuDeviceGetAttribute(&most, MAX_SHARED_OF_BLOCK, device))) return status;
    if ((status = cuda.cuFuncGetAttribute(&taken, STATIC_SHARED, function))) return status;
    if (shared > most - taken) return 701;
    return cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, most - taken);
}

static PyObject *load(PyObject *module, PyObject *arguments) {
    const char *name;
    Py_buffer image;
    int device, threads, shared, status;
    void *loaded = NULL, *function = NULL;
    if (!PyArg_ParseTuple(arguments, "y*siii", &image, &name, &device, &threads, &shared)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = enter(device);
    if (!status) status = cuda.cuModuleLoadData(&loaded, image.buf);
    if (!status) status = cuda.cuModuleGetFunction(&function, loaded, name);
    if (!status) status = prepare(function, device, threads, shared);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&image);
    return status ? raise(status) : PyLong_FromVoidPtr(function);
}

static PyObject *resident(PyObject *module, PyObject *arguments) {
    unsigned long long function;
    int device, threads, shared, status, each = 0, multiprocessors = 0;
    if (!PyArg_ParseTuple(arguments, "Kiii", &function, &device, &threads, &shared)) return NULL;
    status = enter(device);
    if (!status)
        status = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &each, (void *)(uintptr_t)function, threads, (size_t)shared);
    if (!status) status = cuda.cuDeviceGetAttribute(&multiprocessors, MULTIPROCESSORS, device);
    return status ? raise(status) : PyLong_FromLong((long)each * multiprocessors);
}

static int number(char type, PyObject *value, void *slot) {
    if (type == 'd') {
        *(double *)slot = PyFloat_AsDouble(value);
    } else {
        long long integer = PyLong_AsLongLong(value);
        if (type == 'i' && (integer > INT32_MAX || integer < INT32_MIN)) {
            PyErr_Format(PyExc_OverflowError, "%lld does not fit an int32", integer);
            return 0;
        }
        *(int64_t *)slot = integer; /* little-endian: the first bytes of a slot are its int32 */
    }
    return !PyErr_Occurred();
}

static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    Launch *l = PyCapsule_GetPointer(self, NULL);
    if (!l) return NULL;
    if (count != 1 + l->pointers + l->numbers)
        return PyErr_Format(PyExc_TypeError, "a launch takes %zd arguments, not %zd", 1 + l->pointers + l->numbers, count);
    uint64_t values[l->slots];
    void *addresses[l->slots];
    int is_plain = given[0] != Py_None;
    for (Py_ssize_t k = 0; k < l->pointers && is_plain; k++) {
        PyObject *of = given[1 + k], *pointer = PyLong_CheckExact(of) ? Py_NewRef(of) : PyObject_CallMethodNoArgs(of, data_ptr);
        if (!pointer) return NULL;
        values[k] = PyLong_AsUnsignedLongLong(pointer);
        Py_DECREF(pointer);
        if (PyErr_Occurred()) return NULL;
        is_plain = values[k] % ALIGNMENT == 0;
    }
    if (!is_plain) return PyObject_Vectorcall(l->otherwise, given + 1, (size_t)(count - 1), NULL);
    for (Py_ssize_t k = 0; k < l->numbers; k++)
        if (!number(l->types[k], given[1 + l->pointers + k], &values[l->pointers + k])) return NULL;
    Py_ssize_t first = l->pointers + l->numbers;
    memcpy(values + first, l->fixed, (size_t)(l->slots - first) * sizeof *values);
    for (Py_ssize_t k = 0; k < l->slots; k++) addresses[k] = values + k;
    Config config = l->config;
    config.stream = PyLong_AsVoidPtr(given[0]);
    if (PyErr_Occurred()) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = cuda.cuLaunchKernelEx(&config, l->function, addresses, NULL);
    if (status == INVALID_CONTEXT && !(status = enter(l->device)))
        status = cuda.cuLaunchKernelEx(&config, l->function, addresses, NULL);
    Py_END_ALLOW_THREADS;
    if (status) return PyObject_CallFunction(l->failed, "s", message_of(status));
    Py_RETURN_NONE;
}

static void release(PyObject *capsule) {
    Launch *l = PyCapsule_GetPointer(capsule, NULL);
    Py_XDECREF(l->otherwise);
    Py_XDECREF(l->failed);
    free(l->types);
    free(l->fixed);
    free(l);
}

static PyMethodDef launch_method = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL};

static PyObject *launcher(PyObject *module, PyObject *arguments) {
    PyObject *fixed, *otherwise, *failed;
    const char *types, *fixed_types;
    unsigned long long function;
    unsigned grid, threads, shared;
    int device, cooperative;
    Py_ssize_t pointers;
    if (!PyArg_ParseTuple(arguments, "KiIIIpnssO!OO", &function, &device, &grid, &threads, &shared, &cooperative,
                          &pointers, &types, &fixed_types, &PyTuple_Type, &fixed, &otherwise, &failed))
        return NULL;
    Py_ssize_t numbers = (Py_ssize_t)strlen(types), behind = PyTuple_GET_SIZE(fixed);
    if (behind != (Py_ssize_t)strlen(fixed_types)) return PyErr_Format(PyExc_ValueError, "a type for each number");
    Launch *l = calloc(1, sizeof *l);
    PyObject *capsule = l ? PyCapsule_New(l, NULL, release) : NULL;
    if (!capsule) {
        free(l);
        return PyErr_NoMemory();
    }
    l->types = strdup(types);
    l->fixed = calloc((size_t)behind + 2, sizeof *l->fixed); /* a kernel's last two parameters are null pointers */
    l->otherwise = Py_NewRef(otherwise);
    l->failed = Py_NewRef(failed);
    for (Py_ssize_t k = 0; k < behind; k++)
        if (!number(fixed_types[k], PyTuple_GET_ITEM(fixed, k), &l->fixed[k])) {
            Py_DECREF(capsule);
            return NULL;
        }
    l->function = (void *)(uintptr_t)function;
    l->device = device;
    l->pointers = pointers;
    l->numbers = numbers;
    l->slots = pointers + numbers + behind + 2;
    l->config = (Config){{grid, 1, 1}, {threads, 1, 1}, shared, NULL, cooperative ? &l->cooperative : NULL, cooperative != 0};
    l->cooperative.id = COOPERATIVE;
    l->cooperative.value.integer = 1;
    PyObject *made = PyCFunction_New(&launch_method, capsule);
    Py_DECREF(capsule);
    return made;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_O, NULL},
    {"load", load, METH_VARARGS, NULL},
    {"resident", resident, METH_VARARGS, NULL},
    {"launcher", launcher, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "driver", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_driver(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    return data_ptr ? PyModule_Create(&definition) : NULL;
}
