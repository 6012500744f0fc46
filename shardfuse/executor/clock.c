/* Spans of time on a GPU: two events on the stream that the work is on, taken from those that were read before.

   torch's events take 10 us of the host each time one is recorded, as they look the current stream up in Python. */

#include "driver.h"
#include <dlfcn.h>
#include <stdlib.h>

enum { DEVICES = 64 };

static struct {
    int (*cuEventCreate)(void **, unsigned);
    int (*cuEventRecord)(void *, void *);
    int (*cuEventSynchronize)(void *);
    int (*cuEventElapsedTime)(float *, void *, void *);
    int (*cuStreamIsCapturing)(void *, int *);
} cuda;

typedef struct Span {
    void *start, *end;
    int device;
    struct Span *next; /* of those that are free */
} Span;

static Span *unused[DEVICES]; /* events belong to a device's context; the interpreter's lock keeps threads apart */
static const char SPAN[] = "span";

static PyObject *connect_clock(PyObject *module, PyObject *library) {
    const char *name = PyUnicode_AsUTF8(library);
    void *handle = name ? dlopen(name, RTLD_NOW) : NULL;
    if (!name) return NULL;
    if (!handle) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define TAKE(function)                                                                                       \
    if (!(*(void **)&cuda.function = dlsym(handle, #function)))                                              \
        return PyErr_Format(PyExc_OSError, "%s has no " #function, name);
    TAKE(cuEventCreate) TAKE(cuEventRecord) TAKE(cuEventSynchronize) TAKE(cuEventElapsedTime) TAKE(cuStreamIsCapturing)
#undef TAKE
    Py_RETURN_NONE;
}

static void release(PyObject *capsule) {
    Span *s = PyCapsule_GetPointer(capsule, SPAN);
    s->next = unused[s->device];
    unused[s->device] = s;
}

static PyObject *refused(int status) { return PyErr_Format(PyExc_RuntimeError, "CUDA driver error %d in a timed span", status); }

/* A span that begins now, or None in a graph that is being captured, whose events cannot be read. */
static PyObject *begin_span(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "a device and a stream");
    long device = PyLong_AsLong(given[0]);
    void *stream = PyLong_AsVoidPtr(given[1]);
    if (PyErr_Occurred()) return NULL;
    if (device < 0 || device >= DEVICES) return PyErr_Format(PyExc_ValueError, "device %ld", device);
    int capturing = 0, status = enter_device((int)device); /* a backward's thread may begin with this */
    if (!status) status = cuda.cuStreamIsCapturing(stream, &capturing);
    if (status) return refused(status);
    if (capturing) Py_RETURN_NONE;
    Span *s = unused[device];
    if (s) {
        unused[device] = s->next;
    } else {
        if (!(s = calloc(1, sizeof *s))) return PyErr_NoMemory();
        s->device = (int)device;
        status = cuda.cuEventCreate(&s->start, 0);
        if (!status) status = cuda.cuEventCreate(&s->end, 0);
        if (status) free(s);
    }
    if (status) return refused(status);
    PyObject *capsule = PyCapsule_New(s, SPAN, release);
    if (!capsule) return NULL;
    if ((status = cuda.cuEventRecord(s->start, stream))) {
        Py_DECREF(capsule);
        return refused(status);
    }
    return capsule;
}

static PyObject *end_span(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "a span and a stream");
    Span *s = PyCapsule_GetPointer(given[0], SPAN);
    void *stream = s ? PyLong_AsVoidPtr(given[1]) : NULL;
    if (PyErr_Occurred()) return NULL;
    int status = enter_device(s->device);
    if (!status) status = cuda.cuEventRecord(s->end, stream);
    if (status) return refused(status);
    Py_RETURN_NONE;
}

/* Milliseconds, once the span has come to its end. */
static PyObject *length_of_span(PyObject *module, PyObject *span) {
    Span *s = PyCapsule_GetPointer(span, SPAN);
    if (!s) return NULL;
    float found = 0;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = enter_device(s->device);
    if (!status) status = cuda.cuEventSynchronize(s->end);
    if (!status) status = cuda.cuEventElapsedTime(&found, s->start, s->end);
    Py_END_ALLOW_THREADS;
    return status ? refused(status) : PyFloat_FromDouble(found);
}

PyMethodDef clock_methods[] = {
    {"connect_clock", connect_clock, METH_O, NULL},
    {"begin_span", (PyCFunction)(void (*)(void))begin_span, METH_FASTCALL, NULL},
    {"end_span", (PyCFunction)(void (*)(void))end_span, METH_FASTCALL, NULL},
    {"length_of_span", length_of_span, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
