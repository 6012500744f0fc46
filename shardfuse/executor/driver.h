/* What the files of this module have of one another: ``driver.c`` has all of it, except for tables of methods. */

#ifndef SHARDFUSE_DRIVER_H
#define SHARDFUSE_DRIVER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* What a compiled kernel is launched with. */
typedef struct Launch Launch;

/* What a call of ``launcher`` gave; NULL with an error of Python's for anything else. */
const Launch *launch_of(PyObject *function);
/* How many tensors and numbers it takes, and how many slots it hands over. */
Py_ssize_t arguments_of(const Launch *l);
Py_ssize_t slots_of(const Launch *l);
/* What it hands over, from tensors or addresses and numbers: 1, or 0 where a tensor is not aligned, or -1. */
int fill_launch(const Launch *l, PyObject *const *given, uint64_t *values);
/* Launch it with these values: 0, or an error of the driver.  It takes no lock of the interpreter's. */
int start_launch(const Launch *l, void *stream, uint64_t *values);
/* Raise what a launch that the driver refused raises. */
PyObject *raise_refused(const Launch *l, int status);
PyObject *wrong_count(Py_ssize_t wanted, Py_ssize_t count);

/* The driver's words for an error. */
const char *message_of(int status);
/* A thread that has not used the device yet has no context: 0, or an error of the driver. */
int enter_device(int device);

/* Look up what ordered.c calls: the name of what the library has not, or NULL. */
const char *connect_ordered(void *library);

extern PyMethodDef nccl_methods[], clock_methods[], ordered_methods[], repeat_methods[];

#pragma GCC visibility pop
#endif
