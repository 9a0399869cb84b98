// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"strings"
	"testing"

	eventtypes "github.com/containerd/containerd/api/events"
	apitypes "github.com/containerd/containerd/api/types"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

func FuzzEvent(f *testing.F) {
	for topic, m := range map[string]proto.Message{
		taskStart: &eventtypes.TaskStart{ContainerID: "web", Pid: 7}, taskExit: &eventtypes.TaskExit{ContainerID: "web", ID: "web"},
		taskDelete: &eventtypes.TaskDelete{ContainerID: "web", ID: "exec"}, containerUpdate: &eventtypes.ContainerUpdate{ID: "web"},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add("default", topic, b)
	}
	fetch := new(fetcher)
	f.Fuzz(func(t *testing.T, namespace, topic string, b []byte) {
		ev, ok := fetch.eventOf(&apitypes.Envelope{Namespace: namespace, Topic: topic, Event: &anypb.Any{Value: b}})
		if ok && (!strings.HasPrefix(ev.ID, namespace+"/") || len(ev.ID) == len(namespace)+1) {
			t.Errorf("event %+v in %q", ev, namespace)
		}
	})
}
