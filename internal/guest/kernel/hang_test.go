// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf/btf"
)

// typesWith are types in which a task has one more member than its PID.
func typesWith(t *testing.T, member string) func() (*btf.Spec, error) {
	t.Helper()
	number := &btf.Int{Name: "int", Size: 4}
	b, err := btf.NewBuilder([]btf.Type{&btf.Struct{Name: "task_struct", Size: 8, Members: []btf.Member{
		{Name: "pid", Type: number}, {Name: member, Type: number, Offset: 32},
	}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := b.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return func() (*btf.Spec, error) { return spec, nil }
}

// Trampolines are kept from processes that may end with their PID namespace, on kernels that hang
// then.
func TestHang(t *testing.T) {
	const other = 4026532001
	old, mended := typesWith(t, "rcu_tasks_holdout"), typesWith(t, "rcu_tasks_exit_list")
	none := func() (*btf.Spec, error) { return nil, os.ErrNotExist }
	for _, c := range []struct {
		release   string
		namespace uint64
		types     func() (*btf.Spec, error)
		want      error
	}{
		{"5.15.167.4-microsoft-standard-WSL2", other, old, ErrHang},
		{"6.1.0-56-cloud-amd64", other, old, ErrHang},
		{"6.6.87.2-microsoft-standard-WSL2", other, old, ErrHang},
		{"6.6.114.1-microsoft-standard-WSL2", other, mended, nil},
		{"6.1.0-56-cloud-amd64", initialPIDNamespace, old, nil},
		{"6.1.0-56-cloud-amd64", 0, old, nil},
		{"6.1.0-56-cloud-amd64", other, none, os.ErrNotExist},
		{"6.9.0", other, old, nil},
		{"6.12.117", other, old, nil},
		{"7.2.13+deb14-cloud-amd64", other, old, nil},
		{"unknown", other, old, nil},
	} {
		if err := hang(c.release, c.namespace, c.types); !errors.Is(err, c.want) {
			t.Errorf("%s in namespace %d: %v, want %v", c.release, c.namespace, err, c.want)
		}
	}
}
