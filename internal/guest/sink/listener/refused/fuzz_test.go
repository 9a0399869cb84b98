// SPDX-License-Identifier: Apache-2.0

//go:build linux

package refused

import (
	"bytes"
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/guest/kernel/bpf"
	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func FuzzDecode(f *testing.F) {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.NativeEndian, bpf.SockEvent{Family: unix.AF_INET6, Protocol: unix.IPPROTO_TCP, Port: 80, Pid: 7}); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, sample []byte) {
		bind, err := decode(sample)
		if err != nil {
			return
		}
		if a := bind.Address.Addr(); !a.IsValid() || a.Is4In6() || a.Zone() != "" || len(bind.Comm) > 16 {
			t.Errorf("%+v", bind)
		}
	})
}

func TestMain(m *testing.M) { leak.Main(m) }
