// SPDX-License-Identifier: Apache-2.0

// Package guest holds what runs in the guest alone: it sees ports (kernel, observer, source),
// decides what is published (registry), and publishes it (reconcile, sink); agent connects these.
// Containers ask for ports by publish, and for programs by run, which is another program.
package guest
