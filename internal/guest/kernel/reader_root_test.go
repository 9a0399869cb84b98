// SPDX-License-Identifier: Apache-2.0

//go:build linux && root

package kernel

import (
	"errors"
	"os"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
)

// The object may be closed while its reader is used.
func TestReaderDuringClose(t *testing.T) {
	for range 20 {
		o, err := Open(nil, Config{Files: []File{bpf.LoadNat}, Maps: []string{bpf.NatMapReplacements}})
		if err != nil {
			t.Fatal(err)
		}
		r, err := o.Reader(bpf.NatMapReplacements)
		if err != nil {
			t.Fatal(errors.Join(err, o.Close()))
		}
		begun, done := make(chan struct{}), make(chan error)
		go func() {
			close(begun)
			for !r.Ready() { // the ring is empty
			}
			_, err := r.Read()
			done <- err
		}()
		<-begun
		if err := o.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; !errors.Is(err, os.ErrClosed) {
			t.Errorf("read: %v, want %v", err, os.ErrClosed)
		}
	}
}
