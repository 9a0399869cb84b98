// SPDX-License-Identifier: Apache-2.0

package exec

import (
	"io"
	"testing"

	"golang.org/x/sys/windows"
)

// Programs of Windows write no bytes, for which a read returns as at an end. Wine does not let that
// read return, so there this proves less.
func TestWriteOfNothingIsNoEnd(t *testing.T) {
	p, err := newPipe(false)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	go func() {
		var n uint32
		for _, s := range []string{"one", "", "", "two", ""} {
			if err := windows.WriteFile(p.theirs, []byte(s), &n, nil); err != nil {
				t.Error(err)
			}
		}
		p.leave()
	}()
	o := output{file: p.ours}
	b, err := io.ReadAll(&o)
	if string(b) != "onetwo" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
}

// A process that is not the job's can have the writing end.
func TestOutputEndsWithTheJob(t *testing.T) {
	p, err := newPipe(false)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	o := output{file: p.ours}
	var n uint32
	if err := windows.WriteFile(p.theirs, []byte("first"), &n, nil); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := o.Read(b); string(b[:n]) != "first" || err != nil {
		t.Fatalf("read %q, %v", b[:n], err)
	}
	reading := make(chan string)
	go func() {
		b, _ := io.ReadAll(&o)
		reading <- string(b)
	}()
	if err := windows.WriteFile(p.theirs, []byte("last"), &n, nil); err != nil {
		t.Fatal(err)
	}
	o.finish()
	if got := <-reading; got != "last" {
		t.Errorf("the rest is %q", got)
	}
}
